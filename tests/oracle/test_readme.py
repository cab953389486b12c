"""The README's guide and adapter, run as a reader would, on a small trainer with a bug and with the bug mended."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.__main__ import main
from tests.oracle import small_trainer

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(begin: str, end: str) -> str:
    """The README's indented lines from one piece of text to another."""
    start = README.index(f"    {begin}")
    return textwrap.dedent(README[start : README.index(end, start)])


@pytest.fixture
def my_trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The small trainer under the name that the README's scripts import."""
    monkeypatch.setitem(sys.modules, "my_trainer", small_trainer)
    return small_trainer


@pytest.fixture
def mended(my_trainer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bug mended as the README says."""
    assert 'With `CALL = {"use_cache": False}`' in README
    monkeypatch.setattr(my_trainer, "CALL", {"use_cache": False})


@pytest.mark.usefixtures("my_trainer")
def test_the_guide_finds_the_small_trainers_bug(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(block("# noise_or_bug.py\n", "Here 26 tensors"), names)
    assert len(names["differing"](names["batch"])) == 26
    assert capsys.readouterr().out.startswith("['embeddings', 'loss', ")
    with pytest.raises(SystemExit):
        exec(block("def smaller", "    26 tensors differ"), names)
    assert capsys.readouterr().out == block("26 tensors differ", "\nTwo texts of one token")


@pytest.mark.usefixtures("mended")
def test_the_guide_calls_the_mended_trainers_noise_noise(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("# noise_or_bug.py\n", "Here 26 tensors"), {})
    assert capsys.readouterr().out == "noise: the same bits\n"
    model = small_trainer.load_model().eval()
    batch = [[[5, 6, 7, 8], [9, 10, 11], [12], [13, 14]], [[15, 16], [17], [18, 19, 20], [21]]]
    padded, packed = small_trainer.step_padded(model, batch), small_trainer.step_packed(model, batch)
    assert not torch.equal(padded[0], packed[0])  # in float32, as the README says


@pytest.mark.usefixtures("mended")
def test_the_guide_judges_a_step_that_raises(
    my_trainer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sequences that merge may leave too few rows, which this trainer's loss refuses."""
    right = small_trainer.forward_packed
    monkeypatch.setattr(my_trainer, "forward_packed", lambda model, sequences: right(model, sequences)[:-1])
    names: dict[str, Any] = {}
    exec(block("# noise_or_bug.py\n", "Here 26 tensors"), names)
    assert "6 labels, 2 of them positives, for 7 embeddings" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        exec(block("def smaller", "    26 tensors differ"), names)
    assert capsys.readouterr().out.endswith("for 1 embeddings'): [[[16], [17]]]\n")


def test_the_readmes_adapter_shows_the_bug(adapter: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine:Mine", "--examples", "300"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN isolation." in printed


@pytest.mark.usefixtures("mended")
def test_the_readmes_adapter_holds(adapter: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine:Mine", "--all", "--examples", "300"]) == 0
    printed = capsys.readouterr().out
    assert "implementation my-trainer" in printed
    assert "losses.every_option_equals_its_definition" in printed
    assert torch.get_num_threads() == 1


@pytest.fixture
def adapter(my_trainer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's mine.py, as an importable module."""
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    exec(compile(block("# mine.py\n", "    $ python -m oracle check mine:Mine"), "mine.py", "exec"), vars(mine))


class Configured:
    """A module's object, made with arguments that its class's name alone does not give."""

    def __init__(self, name: str):
        self.name = name

    def boundaries(self, position_ids: Tensor) -> list[int]:
        return small_trainer.lengths_from_position_ids(position_ids)


configured = Configured("with arguments")


def test_other_processes_find_an_object_by_the_name_it_was_given() -> None:
    from oracle.contract import load
    from oracle.ranks import specification

    assert specification(load(f"{__name__}:configured")) == f"{__name__}:configured"
