"""Golden files: everything equal as it is, red with a telling message when something changes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impl import Packed, PaddingFree, encoder
from oracle import golden, report
from oracle.__main__ import main
from oracle.case import LOSSES
from oracle.golden import Golden, GoldenError
from tests.faults.founding import StrictDecrease

FEW = ("model-qwen3", "lengths-all-ones", "pooling-mean-qwen3", "loss-qq", "ranks-2-shared")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with five golden cases, and nothing else expected."""
    every = golden.goldens()
    monkeypatch.setattr(golden, "goldens", lambda: {name: every[name] for name in FEW})
    for name in FEW:
        for kind in ("json", "safetensors"):
            shutil.copy(Path("golden") / f"{name}.{kind}", tmp_path)
    return tmp_path


def test_there_are_enough_of_every_kind_and_they_are_small() -> None:
    cases = golden.goldens()
    assert len(cases) >= 40
    assert {c.case.model for c in cases.values()} >= {"qwen3", "llama", "mistral", "gemma3", "qwen3-moe", "bert"}
    assert {c.case.options.pooling for c in cases.values()} == {
        "last",
        "mean",
        "cls",
        "max",
        "mean_sqrt_len",
        "weighted_mean",
    }
    assert {c.case.options.loss for c in cases.values()} == set(LOSSES)
    assert {c.ranks for c in cases.values()} == {0, 2, 4}
    assert any(c.case.stream.each > 1 for c in cases.values())
    files = list(Path("golden").iterdir())
    assert {path.stem for path in files} == cases.keys()
    assert sum(path.stat().st_size for path in files) < 5_000_000


@pytest.mark.slow
def test_oracle_and_implementation_equal_every_file() -> None:
    found = golden.compare(PaddingFree())
    assert found.holds, "\n".join(report.golden_lines(found))
    assert found.checked == len(golden.goldens())


def test_a_strict_decrease_in_the_boundary_rule_turns_it_red(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The founding bug is one character: < for <=."""
    fault = f"{StrictDecrease.__module__}:StrictDecrease"
    assert main(["golden", "compare", "--implementation", fault, "--folder", str(few)]) == 1
    printed = capsys.readouterr().out
    assert "model-qwen3, implementation, embeddings: embeddings: 9 sequences gave 5 embeddings" in printed
    assert "lengths-all-ones, implementation, outcome: could not be computed" in printed
    assert "oracle, " not in printed
    assert "GOLDEN 5 cases" in printed


class OffByOne(PaddingFree):
    """Boundaries one token late: each sequence is pooled at its neighbour's first token."""

    def encode(self, model: Any, sequences: Sequence[Sequence[int]], layout: Any, pooling: str = "last") -> Tensor:
        packed = self.pack(model, sequences, layout)
        states = encoder.hidden_states(model, packed, self.backend)
        late = (packed.last_tokens() + 1).clamp(max=len(states) - 1)
        return torch.nn.functional.normalize(states[late], dim=-1)

    step = StrictDecrease.step


def test_a_boundary_off_by_one_names_the_first_sequence(few: Path) -> None:
    found = golden.compare(OffByOne(), few)
    told = {change.name: change.told for change in found.changes if change.tensor == "embeddings"}
    assert "at sequence 0" in told["model-qwen3"]
    assert "it equals what sequence 1 should have" in told["lengths-all-ones"]


class LastRankErrs(PaddingFree):
    """Every rank but the first has another loss."""

    def rank_loss(self, *arguments: Any) -> Tensor:
        return super().rank_loss(*arguments) + torch.distributed.get_rank(arguments[3])


def test_a_rank_that_differs_from_the_first_is_seen(few: Path) -> None:
    found = golden.compare(LastRankErrs(), few)
    (change,) = found.changes
    assert (change.name, change.who) == ("ranks-2-shared", "implementation")
    assert "the ranks disagree about the loss" in change.told


def test_a_changed_default_temperature_names_the_options(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = golden.goldens()
    cooler = {
        n: Golden(replace(g.case, options=replace(g.case.options, temperature=0.01)), g.ranks) for n, g in every.items()
    }
    monkeypatch.setattr(golden, "goldens", lambda: cooler)
    assert main(["golden", "compare", "--folder", str(few)]) == 1
    printed = capsys.readouterr().out
    assert "model-qwen3, file, case" in printed
    assert "holds another case than the code: options Options(temperature=0.1" in printed
    assert "became Options(temperature=0.01" in printed


def test_a_changed_pooling_names_tensor_and_sequence(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_token(states: Tensor, packed: Packed, pooling: str = "last") -> Tensor:
        return pool(states, packed, "cls" if pooling == "last" else pooling)

    pool = encoder.pool
    monkeypatch.setattr(encoder, "pool", first_token)
    found = golden.compare(PaddingFree(), few)
    lines = report.golden_lines(found)
    assert any(line.startswith("model-qwen3, implementation, embeddings: embeddings at sequence 0") for line in lines)
    assert not any(line.startswith("pooling-mean-qwen3") for line in lines)
    assert not any(line.startswith("lengths-all-ones") for line in lines), "the first token of one is the last"
    assert report.golden_verdict(found) == "GOLDEN 5 cases, 2 differ, 0 missing, 0 unused"
    assert "| model-qwen3 | implementation | embeddings |" in report.golden_markdown(found)


def test_missing_and_unused_files_fail(few: Path) -> None:
    (few / "loss-qq.safetensors").unlink()
    shutil.copy(few / "loss-qq.json", few / "old-name.json")
    found = golden.compare(PaddingFree(), few)
    assert (found.missing, found.unused, found.holds) == (["loss-qq"], ["old-name"], False)
    assert "loss-qq: its files are missing" in "\n".join(report.golden_lines(found))


def test_a_file_that_was_tampered_with_is_named(few: Path) -> None:
    path = few / "loss-qq.json"
    content = json.loads(path.read_text())
    content["gradients"]["norm.weight"] = "0" * 64
    path.write_text(json.dumps(content))
    (few / "model-qwen3.safetensors").write_bytes(b"nothing")
    lines = report.golden_lines(golden.compare(PaddingFree(), few))
    assert any("loss-qq, oracle, gradient of norm.weight: beyond the first 8 numbers" in line for line in lines)
    assert any(line.startswith("model-qwen3, file, case") for line in lines)


def test_the_job_summary_is_written(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["golden", "compare", "--folder", str(few)]) == 0
    assert "Oracle and implementation equal every golden file in every bit." in summary.read_text()


def _repository(folder: Path) -> None:
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def test_update_refuses_a_dirty_tree_and_tells_what_it_changes(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(few)
    (few / "loss-qq.json").unlink()
    shutil.copy(few / "model-qwen3.json", few / "stray.json")
    _repository(few)
    (few / "note").write_text("dirt")
    with pytest.raises(GoldenError, match="the tree is dirty"):
        golden.update(few)
    (few / "note").unlink()
    assert main(["golden", "compare", "--update", "--folder", str(few)]) == 1
    printed = capsys.readouterr().out
    assert "loss-qq: written" in printed
    assert "stray.json: removed, no case asks for it" in printed
    assert " files changed: look at every one before you commit" in printed
    _repository(few)
    assert main(["golden", "update", "--folder", str(few)]) == 0
    assert "GOLDEN unchanged" in capsys.readouterr().out
    assert golden.compare(PaddingFree(), few).holds


def test_update_prints_old_and_new(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = golden.by_oracle

    def moved(case: Golden) -> Any:
        outcome = right(case)
        return replace(outcome, loss=outcome.loss + 0.5)

    monkeypatch.chdir(few)
    _repository(few)
    monkeypatch.setattr(golden, "by_oracle", moved)
    told = golden.update(few)
    assert len(told) == len(FEW)
    assert "1 tensors, most 0.5, loss:" in told[0]
    assert " became " in told[0]
