"""Multimodal: mRoPE positions, of each sequence from itself alone, in a stream that comes apart rightly."""

from __future__ import annotations

from typing import Any

import torch

from oracle import reference
from oracle.case import Case, grids
from oracle.contract import training_step
from oracle.exact import exact
from oracle.images import images_of
from oracle.laws.agreement import padded_step
from oracle.laws.law import Broken, law
from oracle.layout import packed_stream
from oracle.models import VOCABULARY, tiny
from oracle.outcome import compare, compare_embeddings

AXES = {3: "temporal, height, width", 4: "text, temporal, height, width"}


def _shown(case: Case, positions: torch.Tensor | None = None) -> list[str]:
    images = [[f"{t}x{h}x{w}" for t, h, w in own] for own in grids(case.sequences, case.images)]
    lines = [f"lengths {case.lengths}, images {images}, stream order {case.stream.arranged(len(case.lengths))}"]
    if positions is not None:
        names = AXES[len(positions)].split(", ")
        lines += [f"{name:9} {' '.join(map(str, row.tolist()))}" for name, row in zip(names, positions, strict=True)]
    return lines


def _positions(case: Case, rows: int) -> tuple[torch.Tensor, list[int]]:
    shown = grids(case.sequences, case.images)
    interval = 1 + case.seed % 3  # several frames are a video's then, and need not follow at once
    stream = packed_stream(case.sequences, case.stream, VOCABULARY, grids=shown, rows=rows, interval=interval)
    return stream.position_ids, [case.lengths[i] for i in case.stream.arranged(len(case.lengths))]


@law("boundaries", share=60, images=True)
def mrope_rows_give_the_lengths(implementation: Any, case: Case) -> None:
    """Three or four rows of mRoPE position ids, which repeat and restart inside a sequence, give back the lengths."""
    for rows in (3, 4):
        positions, lengths = _positions(case, rows)
        try:
            found = [int(n) for n in implementation.boundaries(positions)]
        except NotImplementedError:
            raise
        except Exception as error:
            raise Broken(
                f"a well-formed stream of {rows} rows was refused: {error}", _shown(case, positions)
            ) from error
        if found != lengths:
            raise Broken(f"{rows} rows gave lengths {found}, packed were {lengths}", _shown(case, positions))


@law("boundaries", share=30, images=True, slots=False)
def mrope_rows_of_no_sequence_are_refused(implementation: Any, case: Case) -> None:
    """Rows that no sequences of text and images have are refused, never guessed at."""
    for rows in (3, 4):
        positions, _ = _positions(case, rows)
        ones = torch.ones(rows, 1, dtype=torch.int64)
        half = -ones
        half[-1] = 0
        wrong = {
            "a slot before the first sequence": torch.cat([-ones, positions], dim=1),
            "a sequence that begins at 1": torch.cat([ones, positions], dim=1),
            "a last token that skips positions": torch.cat([positions, 99 * ones], dim=1),
            "a slot in all rows but one": torch.cat([positions, half], dim=1),
        }
        for what, values in wrong.items():
            try:
                found = implementation.boundaries(values)
            except NotImplementedError:
                raise
            except Exception:
                continue
            raise Broken(f"not refused: {what}; it gave lengths {[int(n) for n in found]}", _shown(case, values))


@law("encode_multimodal", share=10, images=True, contrast=True)
def images_and_text_equal_the_padded_ones(implementation: Any, case: Case) -> None:
    """Embeddings, loss and every gradient, the vision tower's too, equal, bit for bit, those of padded rows."""
    with exact():
        case, expected = padded_step(case)
        found = training_step(implementation, tiny(case.model, case.seed), case)
    difference = compare(expected, found)
    if difference:
        raise Broken(f"{difference} (against padded rows)", [*_shown(case), f"model {case.model}"])


@law("encode_multimodal", share=5, images=True)
def images_and_text_equal_each_sequence_alone(implementation: Any, case: Case) -> None:
    """Every embedding equals, bit for bit, the one computed with its sequence and its images alone."""
    model, images = tiny(case.model, case.seed), images_of(case)
    with exact():
        expected = reference.encode(model, case.sequences, None, case.options.pooling, images=images).detach()
        found = implementation.encode_multimodal(model, case.sequences, images, case.stream, case.options.pooling)
    difference = compare_embeddings(expected, found.detach())
    if difference:
        raise Broken(f"{difference} (against each sequence alone)", [*_shown(case), f"model {case.model}"])
