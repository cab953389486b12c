"""The packed encoder against the padded reference: every model, every back end that runs here."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import PreTrainedModel

import impl
from impl import PaddingFree, attention, encoder, mixers, pack
from impl.errors import BackendError, PackingError
from oracle import exact, reference
from oracle.case import Options, Rows, Stream, from_lengths
from oracle.laws import LAWS, Law
from oracle.models import MODELS, kind, tiny
from oracle.outcome import Outcome, compare, compare_embeddings
from oracle.suite import try_law

LENGTHS = [[3, 1, 7, 1], [1, 1], [12, 2, 1, 9]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_packed_equals_padded_in_every_bit(name: str, backend: str, pooling: str) -> None:
    stream = Stream((9, 2, 1, 0, 5, 4, 6, 7, 8, 3), tail=8, each=2, junk=3)
    case = from_lengths(LENGTHS, model=name, options=Options(pooling=pooling), stream=stream)
    before = attention.ran[backend]
    with exact():
        made = PaddingFree(backend).step(tiny(name), case)
        expected = reference.step(tiny(name), case, Rows())
    found = Outcome(made.embeddings, made.loss, made.gradients, made.input_gradients)
    assert compare(expected, found) is None
    layers = tiny(name).config.get_text_config().num_hidden_layers - len(mixers.mixers(tiny(name)))
    assert attention.ran[backend] == before + layers, "another back end ran"


@pytest.mark.parametrize("name", ["qwen3", "lfm2", "bert"])
@pytest.mark.parametrize("most", [1, 5, 13])
def test_a_long_stream_in_pieces_equals_the_reference(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE", most)
    model, case, calls = tiny(name), from_lengths(LENGTHS, model=name), 0

    def counted(*_: object) -> None:
        nonlocal calls
        calls += 1

    with exact(), model.register_forward_pre_hook(counted):
        made = PaddingFree().step(model, case)
    with exact():
        expected = reference.step(tiny(name), case, Rows())
    assert calls > 1
    assert compare(expected, Outcome(made.embeddings, made.loss, made.gradients, made.input_gradients)) is None


@pytest.mark.parametrize(
    "law", [law for law in LAWS if law.family in ("isolation", "agreement")], ids=lambda law: law.name
)
def test_the_laws_hold_in_pieces(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE", 5)
    assert try_law(law, PaddingFree(), "qwen3", 20).finding is None


def test_a_training_step_as_a_library() -> None:
    model, case = tiny("qwen3"), from_lengths(LENGTHS)
    with exact():
        embeddings = impl.encode(model, pack(case.sequences))
        loss = impl.infonce(embeddings, case.labels)
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with exact():
        wanted = reference.step(model, case, Rows())
    assert compare(wanted, Outcome(embeddings.detach(), loss.detach(), gradients)) is None


def _prefix(model: PreTrainedModel) -> str:
    """Of the text model's parameters: texts alone give a vision tower no gradient."""
    return "language_model" if model.get_decoder() is not model else ""


@pytest.mark.parametrize("name", MODELS)
def test_one_token_sequences_alone_still_have_every_gradient(name: str) -> None:
    """A short cut for one token (output = value) would leave query and key without any."""
    model, case = tiny(name), from_lengths([[1, 1, 1], [1, 1]], model=name)
    with exact():
        made = PaddingFree().step(model, case)
    assert made.gradients.keys() == {n for n, _ in model.get_decoder().named_parameters(prefix=_prefix(model))}


def test_the_last_tokens_vector_is_gathered_not_a_padded_block() -> None:
    states, packed = torch.arange(14.0).view(7, 2), pack([[1, 2, 3], [1], [1, 2], [9]])
    assert encoder.pool(states, packed).tolist() == states[[6, 0, 3, 1]].tolist()
    means = encoder.pool(states, packed, "mean")
    assert means.tolist() == [
        states[4:7].mean(0).tolist(),
        states[0].tolist(),
        states[2:4].mean(0).tolist(),
        states[1].tolist(),
    ]
    with pytest.raises(PackingError, match="no pooling 'best'; there are last, mean, cls"):
        encoder.pool(states, packed, "best")


@pytest.mark.parametrize("name", MODELS)
def test_plain_float64_is_close_to_the_reference_too(name: str) -> None:
    case, model = from_lengths(LENGTHS, model=name), tiny(name)
    if name == "qwen3-moe":
        model.set_experts_implementation("eager")  # torch's grouped product has no float64 of its own
    with torch.no_grad():
        found = impl.encode(model, pack(case.sequences, first_position=kind(name).first_position), backend="sdpa")
        expected = reference.encode(model, case.sequences, None, first_position=kind(name).first_position)
    if name == "qwen3-moe":
        model.set_experts_implementation("grouped_mm")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny("qwen3")
    before = model.config._attn_implementation, model.config.use_cache
    with torch.no_grad(), exact():
        impl.encode(model, pack([[5, 6]]))
    assert (model.config._attn_implementation, model.config.use_cache) == before


def test_back_ends_are_chosen_by_device_and_dtype_and_named_when_unknown() -> None:
    assert attention.choose(torch.device("cpu"), torch.float32) == "sdpa"
    assert attention.choose(torch.device("cpu"), torch.bfloat16) == "sdpa"
    assert attention.choose(torch.device("cuda"), torch.float64) == "sdpa"
    expected = "flash_attn" if importlib.util.find_spec("flash_attn") else "varlen"
    assert attention.choose(torch.device("cuda"), torch.bfloat16) == expected
    with pytest.raises(BackendError, match="no attention back end 'eager'; there are sdpa, varlen, flash_attn"):
        impl.encode(tiny("qwen3"), pack([[5, 6]]), backend="eager")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_back_end_that_is_not_installed_is_refused() -> None:
    with pytest.raises(BackendError, match="needs the package flash-attn"):
        impl.encode(tiny("qwen3"), pack([[5, 6]]), backend="flash_attn")


def test_a_model_that_goes_round_the_back_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fall-back would let sequences see each other."""
    monkeypatch.setattr(attention.AttentionInterface, "get_interface", lambda self, name, default: default)
    with pytest.raises(BackendError, match="Qwen3Model never called the attention back end sdpa"):
        impl.encode(tiny("qwen3"), pack([[5, 6]]))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers gives the method another name
@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_gradient_checkpointing_needs_the_attention_for_good(name: str) -> None:
    """Layers are computed again in the backward pass, when a context would be over."""
    model, case = tiny(name, 7), from_lengths(LENGTHS, model=name)
    with exact():
        expected = PaddingFree().step(model, case)
    before = model.config._attn_implementation
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        with pytest.raises(BackendError, match=r"impl\.attention\.install\(model\) first"):
            PaddingFree().step(model, case)
        attention.install(model)
        with exact():
            found = PaddingFree().step(model, case)
    finally:
        model.gradient_checkpointing_disable()
        model.set_attn_implementation(before)
    for parameter, gradient in expected.gradients.items():
        assert torch.equal(gradient, found.gradients[parameter]), parameter


def test_the_attention_without_boundaries_is_refused() -> None:
    model = tiny("qwen3")
    with attention.using(model, "sdpa"), pytest.raises(BackendError, match="needs the stream's boundaries"):
        model(torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    ("feature", "given"),
    [("dropout", {"dropout": 0.1}), ("softcap", {"softcap": 30.0}), ("attention sinks", {"s_aux": torch.zeros(4)})],
)
def test_what_the_back_ends_do_not_offer_is_refused(feature: str, given: dict[str, object]) -> None:
    from transformers import AttentionInterface

    q, packed = torch.zeros(1, 4, 2, 8), pack([[5, 6]])
    forward = AttentionInterface()[attention.registered("sdpa")]
    module = tiny("qwen3").layers[0].self_attn
    with pytest.raises(BackendError, match=f"asks for {feature}"):
        forward(module, q, q, q, None, packing=packed, **given)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (2, 0), (3, 3), (40, 40)])
def test_windows_mean_the_same_to_every_back_end(window: tuple[int, int]) -> None:
    packed = pack([[1], [2], [3] * 3, [4] * 9, [5] * 9])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(23, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    with exact():
        a, b = (attention.BACKENDS[name](q, k, v, packed, window, 0.3) for name in ("sdpa", "varlen"))
    assert torch.equal(a, b)


def test_embeddings_are_compared_at_all() -> None:
    """The canary of this file: a wrong order is seen."""
    case, model = from_lengths(LENGTHS), tiny("qwen3")
    with torch.no_grad(), exact():
        found = impl.encode(model, pack(case.sequences))
        assert compare_embeddings(reference.encode(model, case.sequences, Rows()), found.flip(0)) is not None
