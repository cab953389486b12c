"""Convolutions and recurrences keep within their sequences, or are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import impl
from impl import attention, mixers, pack
from impl.errors import BackendError
from oracle.exact import exact
from oracle.models import tiny

HYBRIDS = ["qwen3-next", "lfm2"]
SEQUENCES = [[5, 6, 7], [8, 9], [10], [11, 12, 13], [14]]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_is_left_as_it_was(name: str) -> None:
    model = tiny(name)
    (mixer,) = mixers.mixers(model)
    with exact():
        before = impl.encode(model, pack(SEQUENCES))
        assert "forward" not in vars(mixer)
        alone = model(torch.tensor([[5, 6, 7]]), use_cache=False).last_hidden_state[:, -1]
        assert torch.equal(before[:1], torch.nn.functional.normalize(alone, dim=-1))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers gives the method another name
@pytest.mark.parametrize("name", HYBRIDS)
def test_an_installed_model_can_be_copied_and_computes_layers_again(name: str) -> None:
    model = copy.deepcopy(tiny(name))
    with exact():
        expected = impl.encode(tiny(name), pack(SEQUENCES)).detach()
    attention.install(model)
    model = copy.deepcopy(model)  # a copy's mixer must be its own
    (mixer,) = mixers.mixers(model)
    assert mixer.forward.__self__ is mixer
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with exact():
        found = impl.encode(model, pack(SEQUENCES))
        found.sum().backward()
    assert torch.equal(found.detach(), expected)


class Doubled(torch.nn.Module):
    """A mixer with arguments of every kind; what it saw as one batch is remembered."""

    def forward(self, hidden_states: Tensor, times: int, *, plus: int = 0) -> Tensor:
        self.seen = [*getattr(self, "seen", []), tuple(hidden_states.shape)]
        return hidden_states * times + plus


def test_a_mixer_gets_its_arguments_with_and_without_a_packed_stream() -> None:
    mixer, packed = Doubled(), pack(SEQUENCES)
    mixers._install([mixer])
    states = torch.arange(20.0).view(1, 10, 2)
    assert torch.equal(mixer(states, 3, plus=1, packing=packed), states * 3 + 1)
    assert mixer.seen == [(2, 1, 2), (1, 2, 2), (2, 3, 2)]
    assert torch.equal(mixer(states, 3, plus=1), states * 3 + 1)
    assert mixer.seen[3:] == [(1, 10, 2)]


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])  # one unknown, one without its mixer
def test_a_layer_that_nobody_knows_is_refused_by_name(kind: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(BackendError, match=f"layer 1 is of type {kind}"):
        impl.encode(model, pack(SEQUENCES))


def test_a_convolution_that_no_layer_type_tells_of_is_refused_by_name() -> None:
    model = copy.deepcopy(tiny("llama"))
    model.layers[0].mlp.conv1d = torch.nn.utils.skip_init(torch.nn.Conv1d, 4, 4, 3)
    with pytest.raises(BackendError, match=r"layers\.0\.mlp\.conv1d is a convolution"):
        impl.encode(model, pack(SEQUENCES))


def test_a_mixer_cannot_be_sharded() -> None:
    with (
        pytest.raises(BackendError, match="Lfm2ShortConv mixes tokens without attention"),
        mixers.within_sequences(tiny("lfm2")),
    ):
        tiny("lfm2")(input_ids=torch.tensor([[5, 6]]), packing=object())
