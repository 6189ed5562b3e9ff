"""Layouts of mixtures of experts on up to eight ranks, in which every two values of any two axes meet.

As in layout_cover.py, whose degrees and batch splits are combined with those of experts: how they are split, how tokens
travel, load balancing, dropping and recomputation. If numbers depend on how a batch is split, one process splits it the
same way (``tree_of_one_process``).
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

from megalith.config import MoEConfig, violations
from megalith.insight.verify.experts import comparable_at
from tests.tiny_run import LLAMA, VOCAB

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

MOST_RANKS = 8
_DEGREES = ("tensor", "context", "pipeline", "replicate", "shard")
_SIGMOID = {"score_function": "sigmoid"}

ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence_balance": 0.3, "z_loss": 0.1, "pre_softmax": True},
    "micro_batch": {"micro_batch_balance": 0.3},
    "global": {"global_balance": 0.3, "scaling_factor": 1.5},
    "expert_bias": {**_SIGMOID, "expert_bias_update_rate": 0.05, "bias": True},
    "groups": {**_SIGMOID, "expert_bias_update_rate": 0.05, "num_groups": 2, "group_topk": 1, "sequence_balance": 0.1},
    "sinkhorn": {"selection": "sinkhorn"},
    "quantile": {"selection": "quantile", "quantile_decay": 0.5},
}
CAPACITIES: dict[str, dict[str, Any] | None] = {
    "dropless": None,
    "by_weight": {"factor": 1.0},
    "by_place": {"factor": 1.0, "drop": "position"},
    "padded": {"factor": 1.0, "pad": True},
}
AXES: dict[str, tuple[Any, ...]] = {
    "expert": (1, 2, 4),
    "expert_tensor": (1, 2),
    "tensor": (1, 2),
    "context": (1, 2),
    "pipeline": (1, 2),
    "replicate": (1, 2),
    "shard": (1, 2),
    "method": ("all_to_all", "all_gather"),
    "max_rows": (None, 0.6),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "full", "mlp", "moe", "layernorm+moe_act"),
    "router": tuple(ROUTERS),
    "capacity": tuple(CAPACITIES),
    "jitter": (0.0, 0.1),
    "layers": (None, (False, True)),
    "shared": (None, "shared", "gate"),
    "latent_size": (None, 16),
    "mtp": (False, True),
}


def world_size(row: Row) -> int:
    """The number of ranks of a layout."""
    return prod(row[name] for name in _DEGREES)


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a tiny run in this layout."""
    recompute = row["recompute"]
    again = {"recompute": recompute}
    if recompute not in ("none", "full"):
        again = {"recompute": "selective", "recompute_modules": recompute.split("+")}
    num_micro_batches = 2 if row["pipeline"] == 1 else 4
    return {
        "parallel": {
            **{name: row[name] for name in (*_DEGREES, "expert", "expert_tensor")},
            "sequence": row["tensor"] > 1,
            "dispatch": {"method": row["method"], "max_rows": row["max_rows"]},
        },
        "model": {
            **LLAMA,
            "vocab_size": VOCAB,
            "moe": {
                "num_experts": 4,
                "ffn_hidden_size": 16,
                "layers": row["layers"],
                "shared_ffn_hidden_size": row["shared"] and 24,
                **({"shared_expert_gate": True} if row["shared"] == "gate" else {}),
                "latent_size": row["latent_size"],
                "router": {**ROUTERS[row["router"]], "jitter": row["jitter"]},
                "capacity": CAPACITIES[row["capacity"]],
            },
            **({"mtp": {"num_modules": 1}} if row["mtp"] else {}),
        },
        "train": {
            "global_batch_size": row["replicate"] * row["shard"] * row["micro_batch_size"] * num_micro_batches,
            "micro_batch_size": row["micro_batch_size"],
            **again,
        },
    }


def tree_of_one_process(row: Row, tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` for one process: micro-batches as needed for comparable numbers, no recomputation."""
    train = {name: value for name, value in tree["train"].items() if not name.startswith("recompute")}
    match comparable_at(MoEConfig(**tree["model"]["moe"])):
        case "any":
            train["micro_batch_size"] = train["global_batch_size"]
        case "equal numbers of them":
            train["micro_batch_size"] *= row["replicate"] * row["shard"]
    return {**{name: group for name, group in tree.items() if name != "parallel"}, "train": train}


def name_of(row: Row) -> str:
    """A row's name: its values other than the first of their axis."""
    changed = {name: value for name, value in row.items() if value != AXES[name][0]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items()) or "one rank"


def layouts(number: int) -> list[Row]:
    """This many layouts, the same in every process; the first of them cover all pairs that any layout can have."""
    covering, rest = _found()
    return [*covering, *rest][:number]


def num_covering() -> int:
    """How many of ``layouts`` it takes to cover every pair."""
    return len(_found()[0])


def pairs(row: Row) -> frozenset[Pair]:
    """Every pair of values in a row."""
    return _pairs(tuple(row.items()))


@cache
def _found() -> tuple[list[Row], list[Row]]:
    drawn = [row for row in _drawn(random.Random(0), 3000) if _is_layout(row)]
    missing = set().union(*map(pairs, drawn))
    covering: list[Row] = []
    while missing:
        best = max(drawn, key=lambda row: (len(pairs(row) & missing), -world_size(row)))
        covering.append(best)
        missing -= pairs(best)
    return covering, [row for row in drawn if row not in covering]


@cache
def _pairs(row: tuple[tuple[str, Any], ...]) -> frozenset[Pair]:
    return frozenset(combinations(row, 2))


def _drawn(source: random.Random, number: int) -> Iterator[Row]:
    for _ in range(number):
        yield {name: source.choice(values) for name, values in AXES.items()}


def _is_layout(row: Row) -> bool:
    """Whether the settings accept ``row``, and one process can reproduce its numbers."""
    if not 1 < world_size(row) <= MOST_RANKS:
        return False
    if world_size(row) // row["pipeline"] % (row["expert"] * row["expert_tensor"]):
        return False
    if row["capacity"] != "dropless" and row["router"] in ("sinkhorn", "quantile"):
        return False
    if row["capacity"] == "padded" and (row["method"] == "all_gather" or row["max_rows"] is not None):
        return False
    if row["capacity"] != "dropless" and (row["tensor"] > 1 or row["context"] > 1 or row["router"] == "global"):
        return False  # which tokens are dropped depends on which tokens a rank has
    if row["recompute"] == "mlp" and row["layers"] is None and row["shared"] is None:
        return False  # no layer has an MLP, not even a shared expert
    groups = settings_of(row)
    tree = {
        **groups,
        "data": {"train": "text", "seq_length": 16},
        "train": {"steps": 4, **groups["train"]},
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    return not violations(tree, world_size=world_size(row))
