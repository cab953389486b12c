"""Released packages before the suite, against what is expected of them.

python -m tests.peers ms-swift==3.10.1           where it is installed: every adapter, every law; 1 on a surprise
python -m tests.peers ms-swift==3.10.1 --write   puts what was found into expectations.json
python -m tests.peers --readme                   writes the README's track record from expectations.json
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import transformers
from rich.console import Console

from oracle.contract import load
from oracle.report import finding
from oracle.suite import Report, check, save
from tests.measuring import write_part
from tests.peers import expectations

PEERS = expectations.FOLDER / "peers.toml"
EXAMPLES = 1600


def peers() -> dict[str, dict[str, Any]]:
    """peers.toml."""
    return tomllib.loads(PEERS.read_text(encoding="utf-8"))


def judge(
    peer: str,
    adapters: Sequence[str],
    stored: expectations.Expectations,
    console: Console,
    examples: int,
    seed: int = 0,
) -> tuple[dict[str, Report], list[str]]:
    """Tries every law on every adapter and prints what breaks; the reports, and what was not expected."""
    reports, surprises = {}, []
    times = peers().get(peer, {}).get("times", {})
    for adapter in adapters:
        name, _, model = adapter.partition(" ")
        specification = f"tests.peers.{name}"
        cases = examples * times.get(adapter, 1)
        found = check(load(specification), model or "qwen3", cases, seed, stop_at_first=False)
        console.print(f"\n{peer}, {adapter}: {found.verdict}", highlight=False, markup=False, soft_wrap=True)
        for result in found.results:
            if result.finding:
                finding(console, result.finding, result.sentence, save(result.finding, specification))
        told = expectations.surprises(stored.of(peer, adapter), found)
        surprises += [f"{peer}, {adapter}: {each}" for each in told]
        reports[adapter] = found
    return reports, surprises


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 on a surprise, 2 where the package is another."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("peer", nargs="?", choices=sorted(peers()))
    parser.add_argument("--adapter", action="append", help="this one alone, module:Class or 'module:Class model'")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="cases drawn for each adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="store what was found")
    parser.add_argument("--readme", action="store_true", help="write the README's track record")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 160)
    surprises: list[str] = []
    if given.peer:
        name, _, wanted = given.peer.partition("==")
        if version(name) != wanted:
            console.print(f'{name} {version(name)} is installed, not {wanted}: nox -s "peers({given.peer})"')
            return 2
        adapters = given.adapter or peers()[given.peer]["adapters"]
        reports, surprises = judge(given.peer, adapters, expectations.load(), console, given.examples, given.seed)
        for told in surprises:
            console.print(f"SURPRISE {told}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"PEER {given.peer}: {len(surprises)} surprises", highlight=False)
        if given.write:
            stored = expectations.load()  # again: another run may have written meanwhile
            for adapter, found in reports.items():
                expectations.recorded(stored, given.peer, adapter, found)
            expectations.save(stored)
    if given.readme:
        lines = expectations.track_record(expectations.load())
        write_part(expectations.README, expectations.BEGIN, expectations.END, lines)
    return 1 if surprises and not given.write else 0


if __name__ == "__main__":
    sys.exit(main())
