"""Packing: boundaries kept, boundaries recovered, boundaries refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl import Packed, boundaries, from_stream, pack
from impl.errors import BoundaryError, PackingError
from impl.packing import real_tokens, unpack
from oracle.case import Case
from oracle.layout import packed_stream
from oracle.models import VOCABULARY
from oracle.strategies import cases, lengths

SEQUENCES = [[11, 12, 13], [21], [31, 32], [41]]


def test_packed_by_length_so_that_equal_lengths_are_neighbours() -> None:
    packed = pack(SEQUENCES)
    assert packed.input_ids.tolist() == [21, 41, 31, 32, 11, 12, 13]
    assert packed.position_ids.tolist() == [0, 0, 0, 1, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 1, 2, 4, 7]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.lengths == (1, 1, 2, 3)
    assert packed.order == (1, 3, 2, 0)
    assert packed.places == [3, 0, 2, 1]
    assert packed.runs == [(1, 2), (2, 1), (3, 1)]
    assert packed.max_seqlen == 3
    assert packed.last_tokens().tolist() == [6, 0, 3, 1]


@given(st.lists(lengths(), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_every_token_is_where_it_belongs_in_any_order(drawn: list[int], random: object) -> None:
    sequences = [list(range(100 * i, 100 * i + length)) for i, length in enumerate(drawn)]
    order = list(range(len(drawn)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for packed in (pack(sequences), pack(sequences, "given"), pack(sequences, order)):
        assert [piece.tolist() for piece in packed.unpack(packed.input_ids)] == sequences
        assert packed.input_ids[packed.last_tokens()].tolist() == [ids[-1] for ids in sequences]
        assert boundaries(packed.position_ids) == list(packed.lengths)
        assert boundaries(cu_seqlens=packed.cu_seqlens, total=len(packed.input_ids)) == list(packed.lengths)


@given(st.lists(lengths(), min_size=1, max_size=20), st.integers(1, 30))
def test_pieces_are_whole_sequences_as_many_as_fit(drawn: list[int], most: int) -> None:
    packed = pack([list(range(100 * i, 100 * i + length)) for i, length in enumerate(drawn)], "given")
    pieces = list(packed.pieces(most))
    assert torch.cat([piece.input_ids for piece in pieces]).equal(packed.input_ids)
    assert [length for piece in pieces for length in piece.lengths] == drawn
    for piece in pieces:
        assert boundaries(piece.position_ids, total=len(piece.input_ids)) == list(piece.lengths)
        assert boundaries(cu_seqlens=piece.cu_seqlens, total=len(piece.input_ids)) == list(piece.lengths)
        assert piece.places == list(range(len(piece.lengths)))
        assert len(piece.input_ids) <= most or len(piece.lengths) == 1
    for piece, after in pairwise(pieces):
        assert len(piece.input_ids) + after.lengths[0] > most


@given(cases())
def test_a_stream_with_slots_gives_back_its_sequences(case: Case) -> None:
    stream = packed_stream(case.sequences, case.stream, VOCABULARY)
    order = case.stream.arranged(len(case.sequences))
    for lengths_ in (None, [case.lengths[i] for i in order]):
        packed = from_stream(stream.input_ids, stream.position_ids, lengths_)
        assert isinstance(packed, Packed)
        assert [tuple(p.tolist()) for p in packed.unpack(packed.input_ids)] == [case.sequences[i] for i in order]


def test_positions_may_start_at_two() -> None:
    packed = pack(SEQUENCES, "given", first_position=2)
    assert packed.position_ids.tolist() == [2, 3, 4, 2, 2, 3, 2]
    assert boundaries(packed.position_ids, first_position=2) == [3, 1, 2, 1]
    with pytest.raises(BoundaryError, match="slot 0 holds position 2; a sequence begins at 0"):
        boundaries(packed.position_ids)


@pytest.mark.parametrize(
    ("sequences", "arguments", "message"),
    [
        ([], {}, "the batch is empty"),
        ([[1], []], {}, "sequence 1 is empty"),
        ([[1], [2, 9]], {"vocabulary": 9}, "sequence 1 holds the id 9 at 1; the vocabulary has 9"),
        ([[1], [-2]], {"vocabulary": 9}, "sequence 1 holds the id -2 at 0"),
        ([[1], [2]], {"order": "random"}, "order must be 'length', 'given' or a permutation of 2"),
        ([[1], [2]], {"order": [0, 0]}, "order must be"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    sequences: list[list[int]], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(PackingError, match=message):
        pack(sequences, **arguments)  # type: ignore[arg-type]


def rows(*tokens: tuple[int, ...]) -> torch.Tensor:
    """Position ids of several rows from each token's."""
    return torch.tensor(tokens).T


@pytest.mark.parametrize(
    ("given_", "lengths_"),
    [
        # A video's text goes on after the last frame in Qwen2-VL, after the longer side in transformers 5; two of its
        # frames may be at one time.
        ({"position_ids": rows((0, 0, 0), (0, 0, 0), (1, 1, 1))}, [1, 2]),
        ({"position_ids": rows((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (2, 2, 2), (0, 0, 0))}, [5, 1]),
        (
            {"position_ids": rows((0, 0, 0), (50, 0, 0), (51, 51, 51), (-1, -1, -1), (0, 0, 0))},
            [3, 1],
        ),
        (
            {"position_ids": rows((0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 1, 1), (1, 1, 2), (3, 3, 3))},
            [6],
        ),
        ({"position_ids": rows((0, 0, 0), (1, 0, 0), (1, 1, 1), (0, 0, 0))}, [3, 1]),  # transformers 5's
        ({"position_ids": rows((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 1))}, [2, 2]),  # an image, twice
        ({"position_ids": rows((0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 0, 0), (-1, -1, -1, -1))}, [2, 1]),
        ({"position_ids": [0, 1, 0, 0, 1, 2], "lengths": [2, 1]}, [2, 1]),
        ({"position_ids": [0, 1, 0, 0, 0, 0], "lengths": [2, 1], "count": 2}, [2, 1]),
        ({"position_ids": [0, 1, -1, -1, 0, -1], "lengths": [2, 1]}, [2, 1]),
        ({"position_ids": [2, 3, 2], "lengths": [2, 1], "first_position": 2}, [2, 1]),
    ],
)
def test_rows_of_mrope_and_known_lengths(given_: dict[str, object], lengths_: list[int]) -> None:
    assert boundaries(**given_) == lengths_  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"position_ids": []}, "^position_ids is empty: there is no sequence$"),
        ({"position_ids": [-1, 0]}, "slot 0 is -1 before any sequence"),
        ({"position_ids": [1, 2]}, "slot 0 holds position 1; a sequence begins at 0"),
        ({"position_ids": [0, 1, 1]}, "slot 2 holds position 1 after 1: neither its successor nor a beginning"),
        ({"position_ids": [0, 1, 3]}, "slot 2 holds position 3 after 1"),
        ({"position_ids": [0, 2, 1]}, "slot 1 holds position 2 after 0"),
        ({"position_ids": [0, -1, 1]}, "slot 2 holds position 1 after slots of -1"),
        ({"position_ids": [0, -2]}, "slot 1 holds position -2 after 0"),
        ({"position_ids": torch.zeros(1, 3, dtype=torch.int64)}, r"vector of integers, found torch.int64 \(1, 3\)"),
        ({"position_ids": torch.zeros(3)}, "^position_ids must be a vector of integers, found torch.float32"),
        ({"cu_seqlens": [0]}, "at least two entries"),
        ({"cu_seqlens": [1, 2]}, "must start at 0, found 1"),
        ({"cu_seqlens": [0, 3, 2]}, "decreases at sequence 1: 3, then 2"),
        ({"cu_seqlens": [0, 3, 3]}, "sequence 1 is empty"),
        ({"cu_seqlens": [0, 2, 3], "total": 4}, "ends at 3, the stream at 4"),
        ({}, "^give either position_ids or cu_seqlens$"),
        ({"cu_seqlens": torch.zeros(2)}, "^cu_seqlens must be a vector of integers, found torch.float32"),
        ({"position_ids": [0], "cu_seqlens": [0, 1]}, "either position_ids or cu_seqlens"),
        (
            {"position_ids": [0, 1, 2, 3], "count": 2},
            "1 sequences found where 2 .*: one is empty or counts on",
        ),
        (
            {"position_ids": [0, 1, 0, 1], "count": 1},
            "2 sequences found where 1 .*: pads are numbered like one",
        ),
        ({"position_ids": [0, 1, 0], "lengths": [2, 2]}, "lengths sum to 4, the stream holds 3 tokens"),
        ({"position_ids": [0, 1, 0], "lengths": [2, 0]}, "lengths says sequence 1 has 0 tokens"),
        ({"position_ids": [0, 1, 0], "lengths": [3]}, "sequence 0 has 3 tokens from slot 0, but another .* at slot 2"),
        ({"position_ids": [0, 1, 2], "lengths": [2, 1]}, "slot 2 holds position 2; a sequence begins at 0"),
        ({"position_ids": [0, -1, 0], "lengths": [2]}, "sequence 0 has 2 tokens from slot 0: slots stand inside"),
        ({"position_ids": rows((1, 1, 1))}, r"slot 0 holds position \(1, 1, 1\); expected 0 on all axes"),
        (
            {"position_ids": rows((0, 0, 0), (0, 0, 1), (1, 0, 0), (2, 0, 1))},  # one frame at two times
            r"slot 2 holds position \(1, 0, 0\); expected 2 on all axes",
        ),
        ({"position_ids": rows((0, 0, 1))}, r"slot 0 holds position \(0, 0, 1\); expected 0 on all axes"),
        ({"position_ids": rows((0, 0, 0), (0, 0, 1), (3, 3, 3))}, r"slot 2 holds position \(3, 3, 3\); expected 2 on"),
        ({"position_ids": rows((-1, -1, -1), (0, 0, 0))}, "slot 0 is -1 before any sequence"),
        ({"position_ids": rows((0, 0, 0), (-1, -1, -1), (1, 1, 1))}, r"slot 2 holds position \(1, 1, 1\); expected 0"),
        ({"position_ids": rows((0, 0, 0, 0), (1, 0, 0, 0))}, "text's row and the three axes disagree from sequence 0"),
        ({"position_ids": rows((0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 0, 0))}, "the three axes disagree from sequence 0"),
        (
            {"position_ids": rows((0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0))},
            "the three axes disagree from sequence 1 on",
        ),
        ({"position_ids": rows((0, 0, 0, 0), (-1, 0, -1, -1))}, r"slot 1 holds position \(-1, 0, -1, -1\): -1 in some"),
        (
            {"position_ids": rows((0, 0, 0, 0), (0, 0, 0, 0), (-1, 0, 0, 0)), "lengths": [1, 2]},
            r"slot 2 holds position \(-1, 0, 0, 0\): -1",
        ),
        (
            {"position_ids": rows((0, 0, 0, 0), (0, 0, 0, 0), (1, 5, 5, 5)), "lengths": [1, 2]},
            r"slot 2 holds position \(5, 5, 5\); expected 1 on all axes",
        ),
        (
            {"position_ids": rows((0, 0, 0, 0), (0, 0, 0, 0), (-1, 0, 0, 0))},
            r"slot 2 holds position \(-1, 0, 0, 0\): -1",
        ),
        ({"position_ids": rows((0, 0, 0), (1, 1, 1), (1, 1, 1))}, r"slot 2 holds position \(1, 1, 1\); expected 2"),
        ({"position_ids": [-1, 0], "lengths": [1]}, "slot 0 is -1 before any sequence"),
        ({"position_ids": [0, 1], "lengths": []}, "lengths is empty"),
        ({"position_ids": [0, 1], "total": 3}, "2 position ids, told were 3"),
        ({"position_ids": [[0, 1]]}, r"^position_ids must be a vector of integers, found \[0, 1\] in it"),
        ({"cu_seqlens": [0, 1.5, 3]}, "vector of integers, found 1.5 in it"),
        ({"cu_seqlens": [0, 2, 3], "lengths": [1, 2]}, r"cu_seqlens gives lengths \[2, 1\], told were \[1, 2\]"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_place(given_: dict[str, object], message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        boundaries(**given_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "positions", "lengths_", "message"),
    [
        ([1, 2], [0], None, "must be of one length"),
        ([1, 2, 3], [0, 1, -1], [3], "lengths sum to 3, the stream holds 2 tokens"),
        ([1, 2, 3], [0, 1, 0], [], "lengths is empty"),
    ],
)
def test_a_stream_that_contradicts_itself_is_refused(
    ids: list[int], positions: list[int], lengths_: list[int] | None, message: str
) -> None:
    with pytest.raises(BoundaryError, match=message):
        from_stream(torch.tensor(ids), torch.tensor(positions), lengths_)


def test_values_of_another_length_cannot_be_unpacked() -> None:
    with pytest.raises(PackingError, match="6 values for a stream of 7 tokens"):
        pack(SEQUENCES).unpack(torch.zeros(6))


def test_a_stream_with_slots_unpacks_by_its_positions_alone() -> None:
    positions = torch.tensor([0, 1, -1, 0, -1, -1])
    assert [piece.tolist() for piece in unpack(torch.arange(6), positions)] == [[0, 1], [3]]
    with pytest.raises(BoundaryError, match="5 values for a stream of 6 slots and tokens"):
        unpack(torch.arange(5), positions)


def test_a_multimodal_stream_loses_its_slots() -> None:
    positions = rows((0, 0, 0), (0, 0, 1), (-1, -1, -1), (0, 0, 0), (-1, -1, -1))
    packed = from_stream(torch.tensor([9, 9, 0, 7, 0]), positions)
    assert (packed.lengths, packed.input_ids.tolist()) == ((2, 1), [9, 9, 7])
    assert packed.position_ids.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


# --- what mutation testing found untested -----------------------------------------------------------


def test_a_stream_by_somebody_else_has_every_field_of_one_packed_here() -> None:
    ours = pack(SEQUENCES, "given", first_position=2)
    theirs = from_stream(ours.input_ids, ours.position_ids, None, 2, count=4)
    assert theirs.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert theirs.cu_seqlens.dtype == torch.int32
    assert (theirs.lengths, theirs.order) == (ours.lengths, ours.order)
    assert torch.equal(theirs.position_ids, ours.position_ids)
    with pytest.raises(BoundaryError, match="4 sequences found where 3 were packed: pads are numbered like one"):
        from_stream(ours.input_ids, ours.position_ids, None, 2, count=3)
    with pytest.raises(BoundaryError, match="3 sequences found where 4"):
        from_stream(torch.arange(6), torch.tensor([0, 1, 2, 0, 0, 1]), [3, 1, 2], count=4)


def test_the_shapes_that_disagree_are_named() -> None:
    with pytest.raises(BoundaryError, match=r"of one length, found \(2,\) and \(3, 1\)$"):
        from_stream(torch.tensor([1, 2]), torch.zeros(3, 1, dtype=torch.int64))


def test_moving_a_batch_moves_its_three_tensors_and_nothing_else() -> None:
    packed = pack(SEQUENCES)
    moved = packed.to("meta")
    assert {x.device.type for x in (moved.input_ids, moved.position_ids, moved.cu_seqlens)} == {"meta"}
    assert (moved.lengths, moved.order) == (packed.lengths, packed.order)
    for name in ("input_ids", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(packed.to("cpu"), name), getattr(packed, name))


def test_id_0_is_an_id() -> None:
    assert pack([[0], [1, 0]], vocabulary=2).input_ids.tolist() == [0, 1, 0]


def test_what_is_empty_is_refused_in_these_words() -> None:
    with pytest.raises(PackingError, match=r"^the batch is empty: there is nothing to pack$"):
        pack([])
    with pytest.raises(BoundaryError, match=r"^lengths is empty: there is no sequence$"):
        real_tokens(torch.tensor([0, 1]), [])
    with pytest.raises(BoundaryError, match=r"^slot 0 is -1 before any sequence: slots may only follow one$"):
        real_tokens(torch.tensor([-1, 0]), [1])


def test_a_stream_of_positions_from_two_unpacks_with_and_without_lengths() -> None:
    positions = torch.tensor([2, 3, -1, 2, -1])
    assert real_tokens(torch.tensor([0, 1, -1, 0]), [2, 1]).tolist() == [0, 1, 3]
    for known in ([2, 1], None):
        assert [piece.tolist() for piece in unpack(torch.arange(5), positions, known, 2)] == [[0, 1], [3]]
    with pytest.raises(BoundaryError, match="a sequence begins at 0"):
        unpack(torch.arange(5), positions)
    counted = torch.tensor([0, 1, 0, 1])  # the last two are pads: known lengths tell
    assert [piece.tolist() for piece in unpack(torch.arange(4), counted, [2])] == [[0, 1]]


def test_a_slot_of_a_later_sequence_is_named_by_its_place_in_the_stream() -> None:
    positions = rows((0, 0, 0), (1, 1, 1), (0, 0, 0), (5, 5, 5))
    with pytest.raises(BoundaryError, match=r"slot 3 holds position \(5, 5, 5\); expected 1 on all axes"):
        real_tokens(positions, [2, 2])
    wide = rows((0, 0, 0), (0, 0, 1), (9, 9, 9))
    with pytest.raises(BoundaryError, match=r"expected 2 on all axes, or a new sequence.s 0"):
        boundaries(wide)
    several = rows((0, 0, 0), (7, 0, 0), (9, 9, 9))
    with pytest.raises(BoundaryError, match=r"expected 1 or 8 on all axes"):
        boundaries(several)


def test_frames_at_one_time_end_a_sequence_only_at_the_origin() -> None:
    video = [(0, 0, 0), (1, 1, 1), (1, 1, 2), (3, 1, 1), (3, 1, 2)]
    assert boundaries(rows(*video)) == [5]
    assert boundaries(rows(*video, (4, 4, 4))) == [6]
    assert boundaries(rows(*video, (0, 0, 0), (0, 0, 1))) == [5, 2]
