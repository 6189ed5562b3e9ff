"""An independent implementation of routing and its losses: loops over tokens and experts, in numpy and float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def scores_of(row: Array, score: str) -> Array:
    """The scores of all experts for one token."""
    if score == "sigmoid":
        return 1 / (1 + np.exp(-row))
    if score == "sqrtsoftplus":
        return np.sqrt(np.log1p(np.exp(row)))
    exp = np.exp(row - row.max())
    return exp / exp.sum()


def route(
    logits: Array,
    top_k: int,
    *,
    score: str = "softmax",
    pre_softmax: bool = False,
    bias: Array | None = None,
    groups: int | None = None,
    group_topk: int = 1,
    group_score_topk: int | None = None,
    scale: float = 1.0,
) -> tuple[NDArray[np.int64], Array]:
    """The experts of each token, best first, and their weights."""
    chosen, weights = [], []
    for row in logits:
        scores = scores_of(row, score)
        by = row if score == "softmax" and not pre_softmax else scores
        by = by + (0.0 if bias is None else bias)
        allowed = set(range(len(row)))
        if groups is not None:
            members = np.arange(len(row)).reshape(groups, -1)
            best = group_score_topk or top_k // group_topk
            worth = [sum(sorted(by[experts])[::-1][:best]) for experts in members]
            kept = sorted(range(groups), key=lambda g: -worth[g])[:group_topk]
            allowed = {e for g in kept for e in members[g]}
        experts = sorted(allowed, key=lambda e: -by[e])[:top_k]
        if score == "softmax" and not pre_softmax:
            weight = scores_of(row[experts], "softmax")
        else:
            weight = scores[experts]
            if score != "softmax" and top_k > 1:
                weight = weight / weight.sum()
        chosen.append(experts)
        weights.append(weight * scale)
    return np.array(chosen), np.array(weights)


def switch_loss(logits: Array, chosen: Sequence[Sequence[int]], score: str, tokens: Sequence[int]) -> float:
    """L over ``tokens``, rows of ``logits``."""
    T, E, K = len(tokens), logits.shape[1], len(chosen[0])
    total = 0.0
    for e in range(E):
        P = sum(scores_of(logits[t], score)[e] / scores_of(logits[t], score).sum() for t in tokens)
        C = sum(e in chosen[t] for t in tokens)
        total += P * C
    return E / (K * T * T) * total


def z_loss(logits: Array, tokens: Sequence[int]) -> float:
    """Z over ``tokens``, rows of ``logits``."""
    return sum(np.log(np.exp(logits[t]).sum()) ** 2 for t in tokens) / len(tokens)
