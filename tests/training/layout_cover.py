"""Layouts of up to eight ranks in which every two values of any two axes meet: a greedy covering array.

An axis is anything that must not change the numbers: degrees of parallelism, methods and schedules, splits of the
batch, recomputation; and anything they could go wrong on: tied embeddings, uneven layers, few groups of heads, packed
documents, dropout, ragged masks. The settings decide which combinations are valid: a row that they refuse, or that
needs more ranks, is not a layout.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

from megalith.config import violations
from tests.tiny_run import GPT2, LLAMA, VOCAB

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

MOST_RANKS = 8
_FEW_RANKS, _NUM_OF_FEW_RANKS = 4, 24
AXES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "sequence": (False, True),
    "context": (1, 2, 4),
    "context_method": ("ring", "all_gather", "all_to_all", "two_level"),
    "pipeline": (1, 2, 4),
    "virtual": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble", "zb_v"),
    "replicate": (1, 2),
    "shard": (1, 2),
    "micro_batch_size": (1, 2),
    "recompute": ("none", "full", "core_attn", "layernorm+mlp_act", "self_attn+mlp"),
    "fused_loss": (False, True),
    "shape": ("llama", "gpt2"),
    "num_layers": (4, 5),
    "num_query_groups": (8, 2, 1),
    "tied": (False, True),
    "packed": (False, True),
    "dropout": (0.0, 0.1),
    "ragged": (False, True),
}
_DEGREES = ("tensor", "context", "pipeline", "replicate", "shard")
_OF_PARALLEL = (*_DEGREES, "sequence", "context_method", "virtual", "schedule")


def world_size(row: Row) -> int:
    """The number of ranks of a layout."""
    return prod(row[name] for name in _DEGREES)


def global_batch_size(row: Row) -> int:
    """The smallest batch, in samples, that accumulates gradients and in which a pipeline reaches a steady state."""
    num_micro_batches = 2 if row["pipeline"] == 1 else 2 * row["pipeline"]
    return row["replicate"] * row["shard"] * row["micro_batch_size"] * num_micro_batches


def settings_of(row: Row, batch_size: int | None = None) -> dict[str, Any]:
    """The settings of a tiny run in this layout; its global batch is ``batch_size`` or the smallest possible."""
    parallel = {name: row[name] for name in _OF_PARALLEL}
    if row["context"] == 1:
        del parallel["context_method"]
    elif row["context_method"] == "two_level":
        parallel["context_inner"] = 2
    if row["pipeline"] == 1:
        del parallel["virtual"], parallel["schedule"]
    model = {
        **(LLAMA if row["shape"] == "llama" else GPT2),
        "vocab_size": VOCAB,
        "num_attention_heads": 8,
        "num_layers": row["num_layers"],
        "num_query_groups": row["num_query_groups"],
        "tie_word_embeddings": row["tied"],
        "hidden_dropout": row["dropout"],
        "attention_dropout": row["dropout"],
        "ffn_hidden_size": 48,
    }
    return {
        "parallel": parallel,
        "model": model,
        "data": dict.fromkeys(("reset_attention_mask", "reset_position_ids"), row["packed"])
        | {"eod_mask_loss": row["ragged"]},
        "train": {
            "global_batch_size": batch_size or global_batch_size(row),
            "micro_batch_size": row["micro_batch_size"],
            "fused_linear_cross_entropy": row["fused_loss"],
            **_recompute(row["recompute"]),
        },
    }


def _recompute(value: str) -> dict[str, Any]:
    """The settings for none, full, or the names of operations."""
    if value in ("none", "full"):
        return {"recompute": value}
    return {"recompute": "selective", "recompute_modules": value.split("+")}


def name_of(row: Row) -> str:
    """A row's name: its values other than the first of their axis."""
    changed = {name: value for name, value in row.items() if value != AXES[name][0]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items()) or "one rank"


def layouts(number: int) -> list[Row]:
    """This many layouts, the same in every process; the first of them cover all pairs that any layout can have."""
    found, rest = _found()
    assert len(found) + len(rest) >= number, "draw more rows"
    return [*found, *rest][: max(number, len(found))]


def num_covering() -> int:
    """How many of ``layouts`` it takes to cover every pair."""
    return len(_found()[0])


def pairs(row: Row) -> frozenset[Pair]:
    """Every pair of values in a row, without settings that do not apply to it."""
    key = tuple(row.items())
    return _pairs(key)


@cache
def _found() -> tuple[list[Row], list[Row]]:
    """Layouts that cover all pairs, and the remaining ones."""
    drawn = [row for row in _drawn(random.Random(0), 8000) if is_layout(row)]
    missing = set().union(*(pairs(row) for row in drawn))
    few_ranks = [row for row in drawn if world_size(row) <= _FEW_RANKS]
    covering: list[Row] = []
    while missing:
        # layouts with few ranks first: eight ranks on two cores mostly wait for each other
        candidates = few_ranks if len(covering) < _NUM_OF_FEW_RANKS else drawn
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        covering.append(best)
        missing -= pairs(best)
    return covering, [row for row in drawn if row not in covering]


@cache
def _pairs(row: tuple[tuple[str, Any], ...]) -> frozenset[Pair]:
    values = dict(row)
    absent = {"context_method"} if values["context"] == 1 else set()
    absent |= {"virtual", "schedule"} if values["pipeline"] == 1 else set()
    return frozenset(combinations([item for item in row if item[0] not in absent], 2))


def _drawn(source: random.Random, number: int) -> Iterator[Row]:
    for _ in range(number):
        yield {name: source.choice(values) for name, values in AXES.items()}


def is_layout(row: Row, batch_size: int | None = None) -> bool:
    """Whether the settings accept ``row``, with a global batch of ``batch_size`` or the smallest possible."""
    if world_size(row) > MOST_RANKS or (row["sequence"] and row["tensor"] == 1):
        return False
    groups = settings_of(row, batch_size)
    tree = {
        **groups,
        "data": {"train": "text", "seq_length": 16, **groups["data"]},
        "train": {"steps": 4, **groups["train"]},
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    return not violations(tree, world_size=world_size(row))
