"""A mixture of experts with accepted settings can be built and trained; others are refused before building."""

import random
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megalith.config import DispatchConfig, TransformerConfig, violations
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from tests.config.mistakes import VALID
from tests.transformer.shapes import options

CHOICES: dict[str, list[Any]] = {
    "num_experts": [1, 4, 6, 8],
    "top_k": [1, 2, 4],
    "ffn_hidden_size": [None, 5, 16],
    "layers": [None, [False, True]],
    "shared_ffn_hidden_size": [None, 7],
    "shared_expert_gate": [True],
    "latent_size": [None, 3],
}
ROUTER: dict[str, list[Any]] = {
    "score_function": ["softmax", "sigmoid", "sqrtsoftplus"],
    "pre_softmax": [False, False, True],
    "num_groups": [None, None, 2, 4],
    "group_topk": [None, None, 1, 2],
    "group_score_topk": [None, None, 1, 2],
    "scaling_factor": [1.0, 2.5],
    "bias": [False, True],
    "selection": ["top_k", "top_k", "sinkhorn", "quantile", "round_robin"],
    "expert_bias_update_rate": [None, None, 0.0, 1e-3],
    "jitter": [0.0, 0.1],
    "sequence_balance": [0.0, 0.0, 0.1],
    "micro_batch_balance": [0.0, 0.0, 0.1],
    "global_balance": [0.0, 0.0, 0.1],
    "z_loss": [0.0, 0.1],
}
CAPACITY: list[dict[str, Any] | None] = [
    None,
    None,
    {"factor": 1.0},
    {"factor": 0.1, "drop": "position"},
    {"factor": 9.0, "pad": True},
]
# there is one rank: none to gather from, and no share of rows above its own
DISPATCH: list[dict[str, Any]] = [
    *[{}] * 4,
    *[{"max_rows": 0.3}] * 2,
    {"max_rows": 1.0},
    {"method": "all_gather"},
]


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups model.moe and parallel.dispatch, with few options each, so that not all contradict each other."""
    source = random.Random(seed)

    def some(choices: dict[str, list[Any]], number: int) -> dict[str, Any]:
        return {name: source.choice(choices[name]) for name in source.sample(sorted(choices), number)}

    moe = {"num_experts": source.choice(CHOICES["num_experts"]), **some(CHOICES, 3)}
    moe |= {"router": some(ROUTER, source.randrange(4)), "capacity": source.choice(CAPACITY)}
    return moe, source.choice(DISPATCH)


def taken_or_refused(moe: dict[str, Any], dispatch: dict[str, Any]) -> bool:
    """Whether the settings are accepted; if so, a model with them trains on a batch."""
    shape = {"vocab_size": 61, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    tree = {**VALID, "model": {**shape, "moe": moe}, "parallel": {"dispatch": dispatch}}
    try:
        config = TransformerConfig(**shape, moe=moe)
    except (ConfigError, ValidationError):
        assert violations(tree, world_size=1)
        return False
    if violations(tree, world_size=1):
        return False
    try:
        model = GPTModel(config, options(dispatch=DispatchConfig(**dispatch)), seed=1)
    except ConfigError:
        return False
    tokens = torch.arange(12).view(2, 6)
    model(tokens, labels=tokens).mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    return True


@pytest.mark.slow
def test_200_random_mixtures_learn_or_are_refused_at_construction():
    taken = [taken_or_refused(*drawn(seed)) for seed in range(200)]
    assert 30 < sum(taken) < 160


def test_20_random_mixtures_learn_or_are_refused_at_construction():
    assert sum(taken_or_refused(*drawn(seed)) for seed in range(20)) > 2
