"""The command line as a user meets it: output, exit status, replay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from impl import PaddingFree
from oracle.__main__ import main

FAULT = "tests.faults.founding:StrictDecrease"


def test_check_of_our_own_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["check", "--examples", "60", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "founding batch (516 sequences, 253 of one token, 514 labels): 516 embeddings" in printed
    assert "equal in every bit" in printed
    last = printed.strip().splitlines()[-1]
    assert re.fullmatch(r"VERDICT exact: 49 laws, 0 broken, 0 not offered, \d+ cases, \d+ s", last)
    report = json.loads(out.read_text())
    assert report["verdict"] == last
    assert {r["status"] for r in report["results"]} == {"holds"}
    assert report["backends"]["sdpa"] > 0
    assert 40 < report["bits"] <= 53


def test_check_of_the_founding_fault_is_red_and_replays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", FAULT, "--examples", "200", "--json", "report.json"]) == 1
    printed = capsys.readouterr().out
    assert "263 embeddings came back" in printed
    assert "BROKEN boundaries.lengths_are_recovered" in printed
    assert "as packed  |0|0|  lengths [1, 1]" in printed
    assert "as found   |0 0|  lengths [2]" in printed
    assert "48 laws after the broken one were not run; --all runs them" in printed
    replay = re.search(r"python -m oracle (replay \S+)", printed)
    assert replay
    assert main(replay[1].split()) == 1
    assert "2 sequences packed, 1 found" in capsys.readouterr().out
    assert main([*replay[1].split(), "--implementation", "impl:PaddingFree"]) == 0
    assert "HOLDS boundaries.lengths_are_recovered by impl:PaddingFree" in capsys.readouterr().out
    finding = next(r["finding"] for r in json.loads(Path("report.json").read_text())["results"] if r["finding"])
    assert [len(s) for g in finding["case"]["groups"] for s in (g["anchor"], g["positive"])] == [1, 1]


class OnlyBoundaries:
    """A stranger with one surface."""

    name = "stranger"
    __version__ = "0.1"

    def boundaries(self, position_ids: object = None, *, cu_seqlens: object = None) -> list[int]:
        from impl import boundaries

        if cu_seqlens is not None:
            raise NotImplementedError
        return boundaries(position_ids)  # type: ignore[arg-type]


class DeclinesSlots(PaddingFree):
    """Right, but does not do slots; and one that pools a token early at length 17."""

    name = "declines"
    wrong_at = 0

    def encode(self, model: Any, sequences: Any, layout: Any, pooling: str = "last") -> Any:
        if layout.tail > 1 or layout.each > 1:
            raise NotImplementedError("slots")
        right = super().encode(model, sequences, layout, pooling)
        short = [ids[:-1] if len(ids) == self.wrong_at else ids for ids in sequences]
        return super().encode(model, short, layout, pooling) if self.wrong_at else right

    step = None  # type: ignore[assignment]


class DeclinesSlotsAndErrs(DeclinesSlots):
    wrong_at = 17


class FailsInATorchModule(PaddingFree):
    """Torch's own NotImplementedError is an error, not a refusal."""

    def encode(self, model: Any, sequences: Any, layout: Any, pooling: str = "last") -> Any:
        return torch.nn.Module()(1)

    step = None  # type: ignore[assignment]


def test_declined_cases_are_counted_and_the_others_still_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:DeclinesSlots", "--examples", "120"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"agreement.embeddings_equal_the_padded_ones +holds, \d+ declined", printed)
    assert re.search(r"VERDICT exact: .* \d+ cases declined", printed)
    assert main(["check", f"{__name__}:DeclinesSlotsAndErrs", "--examples", "1200"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_an_error_names_the_implementations_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:FailsInATorchModule", "--examples", "60"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"founding batch \(.*\): raised NotImplementedError: .* in encode: return torch.nn.Mod", printed)
    printed = printed.partition("BROKEN")[2]
    assert "raised NotImplementedError" in printed
    assert "in encode: return torch.nn.Module()(1)" in printed


class UsesAnOperatorWithoutARule(PaddingFree):
    """Nobody can vouch for what it returns."""

    def encode(self, model: Any, sequences: Any, layout: Any, pooling: str = "last") -> Any:
        return torch.special.zeta(super().encode(model, sequences, layout, pooling).square() + 2, torch.tensor(2.0))

    step = None  # type: ignore[assignment]


def test_what_exact_arithmetic_refuses_names_law_case_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:UsesAnOperatorWithoutARule", "--examples", "60"]) == 2
    printed = capsys.readouterr().err
    assert "could not judge: UnknownOperatorError: aten.special_zeta" in printed
    assert re.search(r"Met by \w+\.\w+ on lengths \[[\d, ]+\], at .*test_command_line.py:\d+ in encode: ", printed)


class Nothing:
    """No implementation at all."""


class Explodes:
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")


def test_what_is_not_offered_is_said_and_never_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:OnlyBoundaries", "--examples", "60"]) == 0
    printed = capsys.readouterr().out
    assert "implementation stranger 0.1" in printed
    assert "neither step nor encode is offered" in printed
    assert re.search(r"49 laws, 0 broken, 40 not offered", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "nowhere.at.all:X"], "cannot import nowhere.at.all"),
        (["check", "impl:Missing"], "impl has no Missing"),
        (["check", "impl"], "does not read package.module:Object"),
        (["check", f"{__name__}:Nothing"], "not an implementation: it has none of boundaries, unpack, encode"),
        (["check", f"{__name__}:Explodes"], "could not be loaded: RuntimeError: no licence"),
        (["check", "--model", "gpt"], "no model 'gpt'; there are qwen3"),
        (["check", "mine.py:X"], "mine.py is a file; name the module, mine:X"),
        (["check", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["replay", "missing.json"], "is not a saved counter-example"),
    ],
)
def test_what_cannot_run_exits_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_bad_arguments_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--examples", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_a_replay_file_must_name_a_law_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"law": "a.b", "implementation": "impl:PaddingFree", "case": {}}))
    assert main(["replay", str(path)]) == 2
    assert "names the law 'a.b', which does not exist" in capsys.readouterr().err
