"""Golden files: what the oracle said, frozen, exactly; a pull request that changes a bit must show it.

Each case is two files in ``golden/``: NAME.json, the case, its digests and where they come from, and
NAME.safetensors, its embeddings and loss in full and the first numbers of every gradient. They hold the
oracle's outcomes, never an implementation's; both are compared with them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracle import losses, reference
from oracle.case import POOLINGS, Case, Grid, Options, Rows, Stream, from_lengths, from_parts
from oracle.contract import training_step
from oracle.exact import exact
from oracle.laws.losses import unit_rows
from oracle.models import MODELS, VISUAL, tiny
from oracle.outcome import Outcome, compare_embeddings, gap, same
from oracle.ranks import over_ranks, spread

FOLDER = Path("golden")
SHOWN = 8  # numbers of each gradient that a file holds


class GoldenError(RuntimeError):
    """Golden files that cannot be compared or may not be written now."""


@dataclass(frozen=True)
class Golden:
    """One frozen computation. ranks: 0 for a training step, else a loss alone over so many ranks."""

    case: Case
    ranks: int = 0


MIX = [[3, 1, 7], [1, 1], [5, 2, 1, 1]]
IMAGES: list[list[list[int | Grid]]] = [[[3], [(1, 2, 4)], [2, (1, 4, 4), 1]], [[1], [(1, 2, 2), 1, (2, 2, 2), 2], [1]]]


def goldens() -> dict[str, Golden]:
    """Every golden case by name: models, layouts, lengths, poolings, losses, ranks."""
    found: dict[str, Golden] = {}

    def add(name: str, lengths: list[list[int]] = MIX, ranks: int = 0, **rest: Any) -> None:
        found[name] = Golden(from_lengths(lengths, **rest), ranks)

    for model in MODELS:
        add(f"model-{model}", model=model)
        stream = Stream((8, 1, 0, 3, 2, 4, 7, 6, 5), 8, 2, 1)
        add(f"slots-{model}", model=model, seed=1, rows=Rows("left", 3, 2), stream=stream)
    for model in VISUAL:
        stream = Stream((2, 0, 5, 4, 1, 3), 4, 2, 1)
        found[f"images-{model}"] = Golden(from_parts(IMAGES, model=model, rows=Rows("left", 1, 2), stream=stream))
    for model in ("qwen3", "bert"):
        for pooling in POOLINGS[1:]:
            add(f"pooling-{pooling}-{model}", model=model, options=Options(pooling=pooling))
    add("lengths-all-ones", [[1] * 5, [1] * 4, [1, 1]])
    add("lengths-giant-among-ones", [[1, 1, 1], [40, 1, 1], [1, 1]])
    add("lengths-powers-of-two", [[7, 8, 9], [15, 16, 17], [2, 4, 1]])
    for name, options in {
        "own-documents": Options(use_batch=False),
        "temperature": Options(temperature=0.05),
        "masked": Options(mask_fake_negative=True, temperature=1.0),
        "qq": Options(include_qq=True),
        "dd": Options(include_dd=True),
        "all-options": Options(include_qq=True, include_dd=True, mask_fake_negative=True),
        "matryoshka": Options(matryoshka=((8, 0.5), (32, 1.0))),
        "paper": Options(loss="qwen3"),
    }.items():
        add(f"loss-{name}", options=options)
    add("loss-hard-negatives", [[3, 1, 7, 2], [1, 1, 4], [5, 2, 1, 1, 6]], options=Options(hard_negatives=2))
    for name in ("cosine_similarity", "contrastive", "online_contrastive"):
        pairs = from_lengths([[3, 1], [7, 1], [1, 5], [2, 2]])
        labelled = tuple(replace(g, label=float(i % 2)) for i, g in enumerate(pairs.groups))
        found[f"loss-{name}"] = Golden(Case(labelled, options=Options(loss=name)))
    for ranks in (2, 4):
        for use_batch in (True, False):
            shared = "shared" if use_batch else "own"
            sizes = [[1] * rows for rows in (3, 2, 4, 5, 2)]
            add(f"ranks-{ranks}-{shared}", sizes, ranks, options=Options(use_batch=use_batch))
    return found


# --- what oracle and implementation say -------------------------------------------------------------


def by_oracle(golden: Golden) -> Outcome:
    """The oracle's outcome, on padded rows in one process."""
    if not golden.ranks:
        model = tiny(golden.case.model, golden.case.seed)
        with exact():
            return reference.step(model, golden.case, golden.case.rows)
    rows = unit_rows(len(golden.case.sequences), golden.case.seed).requires_grad_()
    with exact():
        loss = losses.loss(rows, golden.case.labels, golden.case.options)
        loss.backward()
    assert rows.grad is not None
    return Outcome(rows.detach(), loss.detach(), {"embeddings": rows.grad})


def by_implementation(implementation: Any) -> Callable[[Golden], Outcome]:
    """How an implementation computes the same."""

    def compute(golden: Golden) -> Outcome:
        case = golden.case
        if not golden.ranks:
            model = tiny(case.model, case.seed)
            with exact():
                return training_step(implementation, model, case)
        rows = unit_rows(len(case.sequences), case.seed)
        results = over_ranks(implementation, spread(case, golden.ranks), case.options, rows)
        told = [result.loss.item() for result in results]
        if len(set(told)) > 1:
            raise GoldenError(f"the ranks disagree about the loss: {told}")
        gradient = torch.cat([result.gradient for result in results]) / golden.ranks
        return Outcome(rows, results[0].loss, {"embeddings": gradient})

    return compute


# --- files ------------------------------------------------------------------------------------------


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256((tensor.double() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def _sample(gradient: Tensor) -> Tensor:
    return gradient.flatten()[:SHOWN].clone()


@dataclass(frozen=True)
class Frozen:
    """What a golden file says."""

    embeddings: Tensor
    loss: Tensor
    digests: dict[str, str]
    samples: dict[str, Tensor]


def freeze(outcome: Outcome) -> Frozen:
    """The part of an outcome that a file holds."""
    gradients = {name: g for name, g in outcome.gradients.items() if bool(g.any())}
    return Frozen(
        outcome.embeddings,
        outcome.loss,
        {name: _digest(g) for name, g in sorted(gradients.items())},
        {name: _sample(g) for name, g in sorted(gradients.items())},
    )


def write(name: str, golden: Golden, frozen: Frozen, folder: Path) -> None:
    """Both files of a case."""
    content = {
        "case": json.loads(golden.case.to_json()),
        "ranks": golden.ranks,
        "gradients": frozen.digests,
        "provenance": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "commit": _git("rev-parse", "HEAD"),
            "date": datetime.now(UTC).date().isoformat(),
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tensors = {"embeddings": frozen.embeddings, "loss": frozen.loss.reshape(1)}
    tensors |= {f"gradient.{parameter}": sample for parameter, sample in frozen.samples.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors")


def read(name: str, golden: Golden, folder: Path) -> Frozen:
    """A case's files; GoldenError where they hold another case or do not belong together."""
    try:
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / f"{name}.safetensors")
        case, ranks, digests = Case.from_json(json.dumps(content["case"])), content["ranks"], content["gradients"]
        loss = tensors.pop("loss")[0]
        embeddings = tensors.pop("embeddings")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise GoldenError(f"{folder / name}: {error}") from error
    if (case, ranks) != (golden.case, golden.ranks):
        raise GoldenError(f"{folder / name}.json holds another case than the code: {_first_change(case, golden.case)}")
    samples = {key.removeprefix("gradient."): tensor for key, tensor in tensors.items()}
    return Frozen(embeddings, loss, digests, samples)


def _first_change(old: Case, new: Case) -> str:
    for part in ("options", "rows", "stream", "model", "seed", "groups"):
        before, after = getattr(old, part), getattr(new, part)
        if before != after:
            return f"{part} {before} became {after}"
    return "the number of ranks changed"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


# --- comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Where something differs from a golden file. who: oracle or implementation; size: greatest difference."""

    name: str
    who: str
    tensor: str
    told: str
    size: float


@dataclass
class Comparison:
    """All changes, and the files that are missing or that no case asks for."""

    checked: int = 0
    changes: list[Change] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether everything is as frozen."""
        return not (self.changes or self.missing or self.unused)


def differences(name: str, who: str, old: Frozen, new: Frozen) -> list[Change]:
    """Embeddings by their first sequence, each gradient, the loss: old and new."""
    found = []
    difference = compare_embeddings(old.embeddings, new.embeddings)
    if difference:
        found.append(Change(name, who, "embeddings", str(difference), difference.size))
    for parameter in sorted(old.digests.keys() | new.digests.keys()):
        if old.digests.get(parameter) == new.digests.get(parameter):
            continue
        before, after = old.samples.get(parameter), new.samples.get(parameter)
        if before is None or after is None:
            told, size = "there is none" if after is None else "there was none", float("inf")
        elif same(before, after):
            told, size = f"beyond the first {SHOWN} numbers", 0.0
        else:
            at = int((before != after).nonzero()[0])
            told, size = f"at {at}: {before[at].item():.17g} became {after[at].item():.17g}", gap(before, after)
        found.append(Change(name, who, f"gradient of {parameter}", told, size))
    if not same(old.loss, new.loss):
        told = f"{old.loss.item():.17g} became {new.loss.item():.17g}"
        found.append(Change(name, who, "loss", told, gap(old.loss, new.loss)))
    return found


def compare(implementation: Any, folder: Path = FOLDER) -> Comparison:
    """Oracle and implementation against every file, in every bit."""
    found, cases = Comparison(), goldens()
    present = {path.stem for path in folder.glob("*.json")} | {path.stem for path in folder.glob("*.safetensors")}
    found.unused = sorted(present - cases.keys())
    sides = {"oracle": by_oracle, "implementation": by_implementation(implementation)}
    for name, golden in cases.items():
        if not (folder / f"{name}.json").exists() or not (folder / f"{name}.safetensors").exists():
            found.missing.append(name)
            continue
        try:
            old = read(name, golden, folder)
        except GoldenError as error:
            found.changes.append(Change(name, "file", "case", str(error), float("inf")))
            continue
        for who, compute in sides.items():
            try:
                found.changes += differences(name, who, old, freeze(compute(golden)))
            except Exception as error:
                told = f"could not be computed: {type(error).__name__}: {error}"
                found.changes.append(Change(name, who, "outcome", told, float("inf")))
        found.checked += 1
    return found


def update(folder: Path = FOLDER) -> list[str]:
    """Writes what the oracle says now; one line for each file that is new, changed or gone.

    Raises GoldenError in a dirty tree: a golden file must come from a commit.
    """
    dirty = _git("status", "--porcelain")
    if dirty:
        raise GoldenError(f"the tree is dirty; commit first, so that golden files come from a commit:\n{dirty}")
    told, cases = [], goldens()
    for name, golden in cases.items():
        new = freeze(by_oracle(golden))
        try:
            changes = differences(name, "oracle", read(name, golden, folder), new)
        except GoldenError as error:
            write(name, golden, new, folder)
            told.append(f"{name}: written ({error})")
            continue
        if changes:
            write(name, golden, new, folder)
            first = max(changes, key=lambda change: change.size)
            told.append(f"{name}: {len(changes)} tensors, most {first.size:.3g}, {first.tensor}: {first.told}")
    for path in [*folder.glob("*.json"), *folder.glob("*.safetensors")]:
        if path.stem not in cases:
            path.unlink()
            told.append(f"{path.name}: removed, no case asks for it")
    return told
