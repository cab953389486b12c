"""The reference against itself, against plain code, and against what it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle import exact, reference
from oracle.case import IMAGE_ID, Case, Options, Rows, from_lengths, from_parts
from oracle.golden import IMAGES
from oracle.laws.sharding import distances
from oracle.models import MODELS, UnknownModelError, kind, tiny
from oracle.outcome import Outcome, compare, compare_embeddings, compare_gradients, gap, same
from oracle.reference import InputError

LAYOUTS = {
    "left": Rows("left"),
    "extra": Rows("right", 5),
    "junk": Rows("right", 2, 7),
    "left junk": Rows("left", 3, 9),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_right_left_extra_junk_and_alone_agree_in_every_bit(name: str, pooling: str) -> None:
    case = from_lengths([[3, 1, 7, 1], [1, 1], [12, 2, 1, 9]], model=name, options=Options(pooling=pooling))
    if kind(name).visual:  # texts alone leave a vision tower without gradients
        case = from_parts(IMAGES, model=name, options=Options(pooling=pooling))
    model = tiny(name)
    with exact():
        expected = reference.step(model, case, Rows())
        for label, layout in {**LAYOUTS, "alone": None}.items():
            assert compare(expected, reference.step(model, case, layout)) is None, label
    assert expected.loss > 0
    assert len(expected.gradients) == len(list(model.parameters()))
    for label, gradient in expected.gradients.items():
        assert gradient.any(), f"vacuous: {label} has no gradient"
    assert expected.input_gradients is not None
    assert [len(g) for g in expected.input_gradients] == case.lengths
    for ids, gradient in zip(case.sequences, expected.input_gradients, strict=True):  # an image takes its tokens' place
        assert bool(gradient.any()) == (set(ids) != {IMAGE_ID})


def test_plain_float64_does_not_agree_so_the_comparison_can_fail() -> None:
    case, model = from_lengths([[3, 1, 7, 1], [1, 1], [12, 2, 1, 9]]), tiny("qwen3")
    rows, alone = reference.step(model, case, Rows()), reference.step(model, case, None)
    assert compare(rows, alone) is not None
    assert rows.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_exact_arithmetic_computes_what_plain_float64_computes(name: str) -> None:
    case, model = from_lengths([[3, 1, 7], [5, 2]], model=name), tiny(name)
    if name == "qwen3-moe":
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 of its own
    plain = reference.step(model, case, None)
    if name == "qwen3-moe":
        model.set_experts_implementation("grouped_mm")
    with exact():
        found = reference.step(model, case, None)
    torch.testing.assert_close(found.embeddings, plain.embeddings, rtol=0, atol=2e-4)
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-3, atol=1e-3)
    for label, gradient in plain.gradients.items():
        torch.testing.assert_close(
            found.gradients[label], gradient, rtol=0, atol=2e-3 * max(1.0, float(gradient.abs().max()))
        )


def test_the_last_token_is_the_last_by_length_even_if_its_id_is_the_pads() -> None:
    """Qwen3-Embedding closes a text with the pad id."""
    model = tiny("qwen3")
    with exact():
        closed, other = reference.encode(model, [(5, 6, 0), (5, 6)], Rows("right", 2))
        (alone,) = reference.encode(model, [(5, 6, 0)], None)
    assert same(closed, alone)
    assert not same(closed, other)


def test_the_models_are_the_same_every_time() -> None:
    tiny.cache_clear()
    first = {n: p.clone() for n, p in tiny("qwen3").named_parameters()}
    tiny.cache_clear()
    for name, parameter in tiny("qwen3").named_parameters():
        assert torch.equal(parameter, first[name])
        assert torch.equal(parameter * 256, (parameter * 256).round()), "off the grid"
    assert not torch.equal(tiny("qwen3", 1).norm.weight, first["norm.weight"])
    frequencies = dict(tiny("qwen3").named_buffers())["rotary_emb.inv_freq"]
    assert frequencies.tolist() == [1.0, 2.0**-4, 2.0**-8, 2.0**-12]


def test_attention_is_far_from_uniform() -> None:
    model = tiny("qwen3")
    ids = torch.tensor([[5, 90, 17, 33, 64, 12]])
    with reference.attention(model, "eager"):
        weights = model(ids, output_attentions=True).attentions[0][0, :, -1].detach()
    assert float(weights.max()) > 0.5
    assert float(weights.min()) < 0.05


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "batch is empty"),
        ([(1,), ()], "sequence 1 is empty"),
        ([(1, 2), (3, 128)], "sequence 1 holds the id 128 at 1; the vocabulary has 128"),
        ([(-1,)], "sequence 0 holds the id -1 at 0"),
    ],
)
def test_bad_sequences_are_refused_by_index(sequences: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        reference.encode(tiny("qwen3"), sequences, Rows())


def test_a_float32_model_is_refused_by_parameter() -> None:
    model = kind("qwen3")
    with torch.random.fork_rng(devices=[]):
        single = model.build()
    with pytest.raises(InputError, match=r"embed_tokens.weight is torch.float32.*model\.double\(\)"):
        reference.step(single, from_lengths([[1, 1]]), Rows())


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match="no model 'gpt'; there are qwen3, qwen3-mha, llama"):
        kind("gpt")


def test_the_model_is_left_as_it_was() -> None:
    model = tiny("qwen3")
    before = model.config._attn_implementation, model.config.use_cache
    reference.step(model, from_lengths([[1, 2]]), Rows())
    assert (model.config._attn_implementation, model.config.use_cache) == before
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


# --- comparing outcomes -----------------------------------------------------------------------------


def _outcome(case: Case) -> Outcome:
    with exact():
        return reference.step(tiny("qwen3"), case, Rows())


CASE = from_lengths([[3, 1, 7], [1, 1]])


def test_differences_are_named_embeddings_first_and_the_loss_last() -> None:
    good = _outcome(CASE)
    assert compare(good, good) is None
    wrong = good.embeddings.clone()
    wrong[2, 5] += 2.0**-40
    difference = compare(good, replace(good, embeddings=wrong, loss=good.loss + 1))
    assert difference is not None
    assert (difference.what, difference.sequence) == ("embeddings", 2)
    assert difference.size == 2.0**-40
    assert "1 of 5 sequences differ" in str(difference)
    gradients = {**good.gradients, "norm.weight": good.gradients["norm.weight"] * 2}
    difference = compare(good, replace(good, gradients=gradients, loss=good.loss + 1))
    assert difference is not None
    assert difference.what == "gradient of norm.weight"
    assert good.input_gradients is not None
    inputs = [g.clone() for g in good.input_gradients]
    inputs[1][0, 0] += 1
    difference = compare(good, replace(good, input_gradients=inputs))
    assert difference is not None
    assert (difference.what, difference.sequence) == ("input gradient", 1)
    difference = compare(good, replace(good, loss=good.loss + 2.0**-40))
    assert difference is not None
    assert difference.what == "loss"


def test_swapped_embeddings_are_recognised() -> None:
    good = _outcome(CASE).embeddings
    difference = compare_embeddings(good, good[[0, 2, 1, 3, 4]])
    assert difference is not None
    assert difference.sequence == 1
    assert "it equals what sequence 2 should have" in str(difference)


def test_a_missing_gradient_differs_unless_it_should_be_zero() -> None:
    good = _outcome(CASE)
    missing = {n: g for n, g in good.gradients.items() if n != "norm.weight"}
    difference = compare(good, replace(good, gradients=missing))
    assert difference is not None
    assert difference.what == "gradient of norm.weight"
    zero = {**good.gradients, "extra": torch.zeros(3, dtype=torch.float64)}
    assert compare(good, replace(good, gradients=zero)) is None


def test_the_size_of_a_difference_below_the_grid_is_told_inside_the_mode_too() -> None:
    good = torch.full((1, 2), 0.5, dtype=torch.float64)
    with exact():
        difference = compare_embeddings(good, torch.full((1, 2), 0.5 + 2.0**-50, dtype=torch.float64))
    assert difference is not None
    assert difference.size == 2.0**-50


def test_nan_never_passes_and_minus_zero_is_zero() -> None:
    nan = torch.full((2, 2), float("nan"), dtype=torch.float64)
    assert not same(nan, nan)
    difference = compare_embeddings(nan, nan)
    assert difference is not None
    assert difference.size == float("inf")
    assert same(torch.tensor([0.0]), torch.tensor([-0.0]))
    zero, minus = (Outcome(torch.tensor([[z]]), torch.tensor(1.0), {}) for z in (0.0, -0.0))
    assert zero.digest() == minus.digest()


def test_counts_and_widths_come_first() -> None:
    good = _outcome(CASE).embeddings
    assert str(compare_embeddings(good, good[:3])) == "embeddings: 5 sequences gave 3 embeddings"
    assert "shape (5, 31), expected (5, 32)" in str(compare_embeddings(good, good[:, :31]))


def test_a_digest_sees_every_part() -> None:
    good = _outcome(CASE)
    digests = {
        good.digest(),
        replace(good, loss=good.loss + 2.0**-40).digest(),
        replace(good, embeddings=good.embeddings + 2.0**-40).digest(),
        replace(good, input_gradients=None).digest(),
        replace(good, gradients={}).digest(),
    }
    assert len(digests) == 5


@pytest.mark.parametrize(("factor", "told"), [(0.5, "half"), (4, "four times"), (-1, "the negative of"), (1.5, None)])
def test_a_difference_by_one_factor_is_told(factor: float, told: str | None) -> None:
    right = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=torch.float64)
    difference = compare_gradients({"w": right}, {"w": right * factor})
    assert ("what it should be" in str(difference)) == (told is not None)
    if told:
        assert f"it is {told} what it should be" in str(difference)


def test_another_shape_is_never_a_small_difference() -> None:
    assert gap(torch.zeros(1), torch.zeros(3)) == float("inf")
    assert gap(torch.zeros(3, 1), torch.zeros(3, 3)) == float("inf")


def test_a_gradient_that_should_not_be_counts_in_plain_float64_too() -> None:
    rows = torch.eye(2, dtype=torch.float64)
    expected, found = Outcome(rows, rows[0, 0], {}), Outcome(rows, rows[0, 0], {"w": rows / 2})
    assert [size for what, _, size in distances(expected, found) if what == "gradient of w"] == [0.5]
    assert [size for what, _, size in distances(found, expected) if what == "gradient of w"] == [0.5]
