"""python -m oracle: check an implementation, replay a counter-example, compare golden files, write a report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console

from oracle import founding, golden, page, report, suite
from oracle.case import Case, CaseError
from oracle.contract import HarnessError, ImplementationError, load
from oracle.exact import ExactError
from oracle.laws import LAWS, Broken, VacuousError
from oracle.models import MODELS, UnknownModelError, kind
from oracle.numeric import DTYPES, law_of

OURS = "impl:PaddingFree"
HOLDS, BROKEN, COULD_NOT_RUN = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m oracle", description="Does a padding-free embedding trainer compute what a padded one computes?"
    )
    commands = whole.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="try every law on an implementation; exit 0 all hold, 1 one is broken, 2 it could not run"
    )
    check.add_argument("implementation", nargs="?", default=OURS, help=f"package.module:Object (default {OURS})")
    check.add_argument("--model", default="qwen3", help=f"one of {', '.join(MODELS)} (default qwen3)")
    check.add_argument("--examples", type=_positive, default=1600, help="cases drawn in all (default 1600)")
    check.add_argument("--seed", type=int, default=0, help="reproduces a run (default 0)")
    check.add_argument("--all", action="store_true", help="go on after the first broken law")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    check.add_argument(
        "--dtype", choices=sorted(DTYPES), help="embeddings in this precision against their bound, instead of the laws"
    )
    replay = commands.add_parser("replay", help="run one saved counter-example again")
    replay.add_argument("file", type=Path, help="as saved by check")
    replay.add_argument("--implementation", help="another implementation than the file's")
    frozen = commands.add_parser(
        "golden", help="oracle and implementation against golden/; exit 0 all equal, 1 something differs"
    )
    frozen.add_argument("action", choices=("compare", "update"))
    frozen.add_argument("--update", action="store_true", help="the same as the action update")
    frozen.add_argument("--implementation", default=OURS, help=f"package.module:Object (default {OURS})")
    frozen.add_argument("--folder", type=Path, default=golden.FOLDER, help="where the files are (default golden)")
    written = commands.add_parser("report", help="a page of the last verdict, the kill matrix, the benchmarks")
    known = page.Sources()
    written.add_argument("--check", type=Path, default=known.check, help=f"by check --json (default {known.check})")
    written.add_argument("--matrix", type=Path, default=known.matrix, help=f"the matrix (default {known.matrix})")
    written.add_argument(
        "--benchmarks", type=Path, default=known.benchmarks, help=f"a folder of records (default {known.benchmarks})"
    )
    written.add_argument("--html", type=Path, default=Path(".oracle/report.html"), help="default .oracle/report.html")
    written.add_argument("--markdown", type=Path, help="also as Markdown; default: a job's summary")
    return whole


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def check(arguments: argparse.Namespace, console: Console) -> int:
    """Tries the founding batch, then every law."""
    implementation = load(arguments.implementation)
    kind(arguments.model)
    if arguments.json and arguments.json.parent == suite.COUNTEREXAMPLES:
        suite.COUNTEREXAMPLES.mkdir(exist_ok=True)  # our own folder, where the report looks, need not be there
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        raise CaseError(f"{arguments.json} cannot be written: there is no folder {arguments.json.parent}")
    report.header(console, suite.describe(implementation), arguments.model, suite.versions(), arguments.seed)
    if arguments.dtype is None:
        told = founding.try_founding_batch(implementation, arguments.model).told
        console.print(told, highlight=False, soft_wrap=True)
    with report.watching(console, arguments.examples) as watch:
        result = suite.check(
            implementation,
            arguments.model,
            arguments.examples,
            arguments.seed,
            not arguments.all,
            watch,
            arguments.dtype,
        )
    report.table(console, result)
    for law in result.results:
        if law.finding:
            saved = suite.save(law.finding, arguments.implementation)
            report.finding(console, law.finding, law.sentence, saved)
    if result.backends:
        ran = ", ".join(f"{name} ({layers} layers)" for name, layers in result.backends.items())
        console.print(f"attention that really ran: {ran}", highlight=False)
    if arguments.json:
        arguments.json.write_text(result.to_json() + "\n", encoding="utf-8")
    console.print(result.verdict, highlight=False, soft_wrap=True)
    return BROKEN if result.count(suite.Status.BROKEN) else HOLDS


def replay(arguments: argparse.Namespace, console: Console) -> int:
    """One saved case under its law."""
    try:
        saved = json.loads(arguments.file.read_text(encoding="utf-8"))
        title, name, raw = saved["law"], saved["implementation"], saved["case"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CaseError(f"{arguments.file} is not a saved counter-example: {error}") from error
    law = next((each for each in [*LAWS, *map(law_of, DTYPES)] if each.title == title), None)
    if law is None:
        raise CaseError(f"{arguments.file} names the law {title!r}, which does not exist")
    case = Case.from_json(json.dumps(raw))
    name = arguments.implementation or name
    try:
        suite.judge(law, load(name), case)
    except Broken as broken:
        console.print(f"BROKEN {title} by {name}: {broken}", highlight=False, markup=False, soft_wrap=True)
        return BROKEN
    except NotImplementedError:
        console.print(f"{title}: {name} declined this case (NotImplementedError)", highlight=False)
        return COULD_NOT_RUN
    console.print(f"HOLDS {title} by {name}, lengths {case.lengths}", highlight=False, soft_wrap=True)
    return HOLDS


def compare_golden(arguments: argparse.Namespace, console: Console) -> int:
    """Compares with the golden files, or writes them anew."""
    if arguments.update or arguments.action == "update":
        lines = golden.update(arguments.folder)
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        changed = f"{len(lines)} files changed: look at every one before you commit"
        console.print(f"GOLDEN {changed if lines else 'unchanged'}", highlight=False)
        return BROKEN if lines else HOLDS
    found = golden.compare(load(arguments.implementation), arguments.folder)
    for line in report.golden_lines(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(report.golden_markdown(found))
    return HOLDS if found.holds else BROKEN


def write_report(arguments: argparse.Namespace, console: Console) -> int:
    """The page, and its Markdown."""
    sources = page.Sources(arguments.check, arguments.matrix, arguments.benchmarks)
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(page.html(sources), encoding="utf-8")
    console.print(f"REPORT {arguments.html}", highlight=False, soft_wrap=True)
    summary = arguments.markdown or os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("w" if arguments.markdown else "a", encoding="utf-8") as file:
            file.write(page.markdown(sources))
    return HOLDS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    arguments = parser().parse_args(argv)
    sys.path.insert(0, str(Path.cwd()))  # an implementation in the current folder can be named
    torch.set_num_threads(1)  # with two threads the tiny models run many times slower
    transformers.logging.set_verbosity_error()  # that fused kernels are missing is meant
    console = Console(width=None if sys.stdout.isatty() else 120)
    commands = {"check": check, "replay": replay, "golden": compare_golden, "report": write_report}
    run = commands[arguments.command]
    try:
        return run(arguments, console)
    except (ImplementationError, UnknownModelError, CaseError, golden.GoldenError) as error:
        Console(stderr=True).print(f"could not run: {error}", highlight=False, markup=False, soft_wrap=True)
    except (HarnessError, ExactError, VacuousError) as error:
        Console(stderr=True).print(
            f"could not judge: {type(error).__name__}: {error}", highlight=False, markup=False, soft_wrap=True
        )
    return COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
