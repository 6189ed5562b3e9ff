"""generation by replay: the tokens of Python, of every kind of layer, one text and many; Python where it must be.

A model with a hook is called as it is, which gives what to compare with.
"""

from typing import Any

import pytest
import torch

from megalith.fusions import use
from megalith.models.generation import generate
from megalith.models.gpt_model import GPTModel
from megalith.models.sampling import Sampling
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


def texts(model: GPTModel, prompts: list[list[int]], temperature: float) -> tuple[list[list[int]], int]:
    """What it generates, and how often the model's Python ran."""
    runs: list[int] = []
    forward = model.model.forward
    model.model.forward = lambda *args: runs.append(1) or forward(*args)  # a hook would be seen
    found = generate(model, prompts, NEW, sampling=Sampling(temperature))
    del model.model.forward
    return found, len(runs)


@pytest.mark.parametrize("prompts", [RAGGED[:1], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_tokens_are_those_of_python(kind, dtype, prompts):
    shape, changes = KINDS[kind]
    model = GPTModel(config(shape, **changes), options(dtype=dtype), seed=1)
    found, num_runs = texts(model, prompts, 0.7)
    hook = model.register_forward_hook(lambda *_: None)
    want, num_plain = texts(model, prompts, 0.7)
    hook.remove()
    assert found == want
    assert num_plain == max(map(len, want))
    # a prompt, and two tokens to record; all but the reference read how many tokens an expert has
    assert num_runs == (NEW if kind == "experts" and dtype != torch.float64 else 3)


def test_another_path_is_python_s():
    model = GPTModel(config(), options(), seed=1)
    with use("reference"):
        assert texts(model, RAGGED, 0.0)[1] == NEW
    assert texts(model, RAGGED, 0.0)[1] == 3
