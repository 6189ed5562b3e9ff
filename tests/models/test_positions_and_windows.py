"""Rotary embeddings and windows per layer, in whole models, against the formula in plain torch."""

from typing import Any

import pytest
import torch

from megalith.errors import ShapeError
from megalith.models.gpt_model import GPTModel
from tests.models.formula import by_formula
from tests.transformer.shapes import config, options

B, S, V = 2, 8, 31
EXACT = 1e-11
TOKENS = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


def built(**settings: Any) -> GPTModel:
    return GPTModel(config(kv_channels=8, **settings), options(), seed=1)


POSITIONS: dict[str, dict[str, Any]] = {
    "half of the features": {"rope": {"percent": 0.5}},
    "neighbours": {"rope": {"interleaved": True, "percent": 0.75}},
    "some layers": {"rope": {"layers": [True, False]}},
    "linear scaling": {"rope": {"scaling": {"type": "linear", "factor": 4.0}}},
    "a window": {"attention": {"window": 3}},
    "windows in some layers": {"attention": {"window": 3, "window_layers": [False, True]}},
    "Gemma 3": {
        "num_layers": 3,
        "rope": {"base": 500.0, "local_base": 10.0, "scaling": {"type": "linear", "factor": 8.0}},
        "attention": {"window": 3, "window_layers": [True, True, False]},
    },
    "Cohere 2": {
        "rope": {"layers": [True, False], "interleaved": True},
        "attention": {"window": 4, "window_layers": [True, False]},
    },
}


@pytest.mark.parametrize("settings", POSITIONS.values(), ids=POSITIONS)
def test_positions_and_windows_of_each_layer_are_those_of_the_formula(settings):
    model = built(**settings)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    want = torch.stack([by_formula(model.config, weights, row) for row in TOKENS])
    got = model(TOKENS)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    got.sin().sum().backward()
    want.sin().sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("settings", POSITIONS.values(), ids=POSITIONS)
def test_caches_hold_what_windows_and_positions_of_each_layer_need(settings):
    model = built(**settings)
    caches = model.new_caches(S)
    got = torch.cat([model(piece, caches=caches) for piece in TOKENS.split([4, 1, 1, 2], dim=1)], dim=1)
    torch.testing.assert_close(got, model(TOKENS), rtol=EXACT, atol=EXACT)


def test_tokens_of_pictures_have_positions_in_time_height_and_width():
    model = built(rope={"sections": [1, 2, 1]})
    positions = torch.randint(9, (3, B, S), generator=torch.Generator().manual_seed(4))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    rows = zip(TOKENS, positions.unbind(1), strict=True)
    want = torch.stack([by_formula(model.config, weights, row, streams) for row, streams in rows])
    torch.testing.assert_close(model(TOKENS, position_ids=positions), want, rtol=EXACT, atol=EXACT)
    of_text = torch.arange(S).expand(3, B, S)
    assert torch.equal(model(TOKENS, position_ids=of_text), model(TOKENS))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_three_streams_of_positions_need_sections(shape):
    with pytest.raises(ShapeError, match=r"must be \[S\] or \[B, S\] without model.rope.sections; got \[3, 2, 8\]"):
        GPTModel(config(shape), options())(TOKENS, position_ids=torch.zeros(3, B, S, dtype=torch.int64))
