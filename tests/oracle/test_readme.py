"""The README's own adapter, run as a reader would: right code holds in everything it offers."""

from __future__ import annotations

import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import impl
from impl.losses import InfoNCE
from oracle.__main__ import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def lengths_from_position_ids(position_ids: Tensor) -> list[int]:
    positions = position_ids.tolist()
    if not positions or positions[0] != 0:
        raise ValueError("no beginning")
    for before, after in pairwise(positions):
        if after not in (0, -1) and (before == -1 or after != before + 1):
            raise ValueError(f"{after} after {before}")
    starts = [at for at, position in enumerate(positions) if position == 0]
    return [sum(p >= 0 for p in positions[a:b]) for a, b in pairwise([*starts, len(positions)])]


def forward_packed(model: Any, packed: list[tuple[int, ...]]) -> Tensor:
    return impl.encode(model, impl.pack(packed, "given"))


def infonce(embeddings: Tensor, labels: list[float], temperature: float) -> Tensor:
    return InfoNCE(temperature=temperature)(embeddings, labels)


def test_the_readmes_adapter_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    block = README[README.index("    # mine.py\n") :]
    block = textwrap.dedent(block[: block.index("    $ python -m oracle check mine:Mine")])
    trainer, mine = ModuleType("my_trainer"), ModuleType("mine")
    vars(trainer).update(
        lengths_from_position_ids=lengths_from_position_ids, forward_packed=forward_packed, infonce=infonce
    )
    monkeypatch.setitem(sys.modules, "my_trainer", trainer)
    monkeypatch.setitem(sys.modules, "mine", mine)
    exec(compile(block, "mine.py", "exec"), vars(mine))
    assert main(["check", "mine:Mine", "--all", "--examples", "300"]) == 0
    printed = capsys.readouterr().out
    assert "implementation my-trainer" in printed
    assert "losses.every_option_equals_its_definition" in printed
    assert torch.get_num_threads() == 1


class Configured:
    """A module's object, made with arguments that its class's name alone does not give."""

    def __init__(self, name: str):
        self.name = name

    def boundaries(self, position_ids: Tensor) -> list[int]:
        return lengths_from_position_ids(position_ids)


configured = Configured("with arguments")


def test_other_processes_find_an_object_by_the_name_it_was_given() -> None:
    from oracle.contract import load
    from oracle.ranks import specification

    assert specification(load(f"{__name__}:configured")) == f"{__name__}:configured"
