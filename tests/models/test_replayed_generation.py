"""Replayed generation: the same tokens as without replay, for every kind of layer, and one or several texts.

A model with a hook is not replayed, which gives the results to compare with.
"""

import copy
from itertools import product
from typing import Any

import pytest
import torch

from megalith.fusions import use
from megalith.models import generation
from megalith.models.generation import generate, stream
from megalith.models.gpt_model import GPTModel
from megalith.models.sampling import Sampling
from tests.sampling import sampled
from tests.transformer.shapes import SHAPES, config, options

RAGGED = [[5, 8, 9, 7, 9, 3, 2, 3, 8], [26], [3, 14, 15, 9, 2, 6]]
_MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{shape: (shape, {}) for shape in SHAPES},
    "windows": ("llama", {"num_layers": 3, "attention": {"window": 4, "window_layers": [True, False, True]}}),
    "sinks": ("llama", {"attention": {"softmax": "learnable"}}),
    "norms of heads, a gate": ("llama", {"attention": {"qk_norm": "RMSNorm", "output_gate": True}}),
    "soft caps": ("llama", {"attention": {"logit_softcap": 5.0}}),
    "a residual stream in float32": ("llama", {"residual": {"fp32": True}}),
    "sandwich norms": ("llama", {"residual": {"norm_placement": "sandwich", "zero_centered_norm": True}}),
    "experts": ("llama", {"moe": _MOE}),
}
NEW = 24


def texts(
    model: GPTModel, prompts: list[list[int]], temperature: float, logits: list[torch.Tensor] | None = None
) -> tuple[list[list[int]], int]:
    """The generated texts, and how often the model's Python ran; appends the logits of each token to ``logits``."""
    runs: list[int] = []
    forward, draw = GPTModel.forward, generation.draw
    seen = [] if logits is None else logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModel, "forward", lambda *args, **how: runs.append(1) or forward(*args, **how))
        patch.setattr(generation, "draw", lambda x, *how: seen.append(x.clone()) or draw(x, *how))
        found = generate(model, prompts, NEW, sampling=Sampling(temperature))
    return found, len(runs)


PROMPTS = {"one": RAGGED[:1], "one token": RAGGED[1:2], "ragged": RAGGED}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("kind", "dtype", "of"), sampled([*product(KINDS, DTYPES, PROMPTS)], lambda case: {case[0], case[1:]})
)
def test_replayed_tokens_are_those_of_python(kind, dtype, of):
    (shape, changes), prompts = KINDS[kind], PROMPTS[of]
    model = GPTModel(config(shape, **changes), options(dtype=dtype), seed=1)
    logits: list[torch.Tensor] = []
    found, num_runs = texts(model, prompts, 0.7, logits)
    hook = model.register_forward_hook(lambda *_: None)
    plain_logits: list[torch.Tensor] = []
    want, num_plain = texts(model, prompts, 0.7, plain_logits)
    hook.remove()
    assert found == want
    for got, logits_of_python in zip(logits, plain_logits, strict=True):
        assert torch.equal(got, logits_of_python)
    assert num_plain == max(map(len, want))
    # all but the reference read the number of tokens per expert
    falls_back = kind == "latents" or (kind == "experts" and dtype != torch.float64)
    num_prompts_read = 0 if prompts == RAGGED[1:2] else 1  # recording also takes one token
    assert num_runs == (NEW if falls_back else num_prompts_read + 2)


def test_another_path_falls_back_to_python():
    model = GPTModel(config(), options(), seed=1)
    with use("reference"):
        assert texts(model, RAGGED, 0.0)[1] == NEW
    assert texts(model, RAGGED, 0.0)[1] == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"ffn_hidden_size": 2**15},
        pytest.param({"kv_channels": 2**14}, marks=pytest.mark.slow),
        {"moe": {**_MOE, "ffn_hidden_size": 2**14}},
        pytest.param({"moe": {**_MOE, "shared_ffn_hidden_size": 2**15}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_too_wide_for_one_kernel_in_one_step_fall_back_to_python(changes):
    two, three = RAGGED[:2], RAGGED
    model = GPTModel(config(**changes), options(dtype=torch.float64), seed=1)
    assert texts(model, two, 0.0)[1] == 3
    assert texts(model, three, 0.0)[1] == NEW


class Own(torch.nn.Module):
    """A user's module, which may do anything."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.modes: list[bool] = []

    def forward(self, *args: Any) -> torch.Tensor:
        self.modes.append(self.training)
        found: torch.Tensor = self.inner(*args)
        return found


def test_parts_of_a_user_are_called_for_every_token():
    model = GPTModel(config(), options(), seed=1)
    layer = next(iter(model.model.layers.values()))
    layer.mlp = Own(layer.mlp)
    assert texts(model, RAGGED, 0.0)[1] == NEW


@pytest.mark.parametrize("num_before", [1, 2, 3, 6])
def test_a_hook_that_comes_after_any_token_is_called_for_all_that_follow(num_before):
    model = GPTModel(config(), options(), seed=1)
    tokens = stream(model, RAGGED[:1], NEW, sampling=Sampling(0.0))
    for _ in range(num_before):
        next(tokens)
    calls: list[int] = []
    next(iter(model.model.layers.values())).register_forward_hook(lambda *_: calls.append(1))
    assert len(list(tokens)) == len(calls) == NEW - num_before


def test_a_hook_and_another_weight_count_from_the_next_token_on():
    model = GPTModel(config(), options(), seed=1)
    want = generate(model, RAGGED[:1], 8, sampling=Sampling(0.0))[0]
    tokens = stream(model, RAGGED[:1], NEW, sampling=Sampling(0.0))
    assert [next(tokens)[0] for _ in range(8)] == want
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    next(tokens)
    hook.remove()
    assert calls == [1]
    only = torch.zeros_like(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(only)  # all logits are 0, and the first is taken
    next(tokens)
    assert next(tokens) == [0]


@pytest.mark.parametrize("num_before", [1, 4])
def test_a_module_that_is_put_in_between_tokens_has_no_dropout_in_the_next_one(num_before):
    model = GPTModel(config(), options(), seed=1)
    layer = next(iter(model.model.layers.values()))
    layer.mlp = first = Own(layer.mlp)
    model.train()
    tokens = stream(model, RAGGED[:1], NEW, sampling=Sampling(0.0))
    for _ in range(num_before):
        next(tokens)
    layer.mlp = second = Own(copy.deepcopy(first.inner)).train()
    next(tokens)
    layer.mlp = first
    next(tokens)
    assert (first.modes, second.modes) == ([False] * (num_before + 1), [False])
    assert first.training
    assert second.training


def test_under_autocast_that_begins_between_tokens_python_runs(monkeypatch):
    model = GPTModel(config(), options(), seed=1)
    runs: list[int] = []
    forward = GPTModel.forward
    monkeypatch.setattr(GPTModel, "forward", lambda *args, **how: runs.append(1) or forward(*args, **how))
    tokens = stream(model, RAGGED[:1], NEW, sampling=Sampling(0.0))
    for _ in range(4):
        next(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        next(tokens)
    next(tokens)
    assert len(runs) == 4  # the prompt, two tokens to record, and this one


def test_a_matrix_product_of_the_users_own_is_called_for_every_token():
    calls: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(1)
        return torch.nn.functional.linear(x, weight, bias)

    model = GPTModel(config("llama"), options(matrix_product=counted), seed=1)
    assert texts(model, RAGGED, 0.0)[1] == NEW
    assert len(calls) % NEW == 0
