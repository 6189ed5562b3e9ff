"""How even the loads of experts are: the numbers of a step's record, and an alarm if routing collapses.

Routing has collapsed if nearly all tokens go to the same experts. The other experts then get no gradient and do not
recover by themselves. A share f_e of T tokens chooses expert e, with K experts each: 0 <= f_e <= 1, and they sum to K.

    collapsed   exp(H) < K + (E - K) / 8, where H = - sum of (f_e / K) log(f_e / K)
                exp(H) is the effective number of experts: m if m experts share the tokens evenly, so at least K, when
                the same K get all tokens, and E for even loads. Also: more than half of the experts get no token
    hot         f_max is in the top tenth of its range from K / E to 1, that is, the max violation, f_max E / K - 1, is
                at least 0.9 times its maximum, E / K - 1

A large max violation is not a sign of collapse: f_max is 1 if every token chooses one expert, however even the other
K - 1 choices are. For K = 2 of E = 8 that leaves exp(H) = 5.3. Such an expert costs time, because the ranks of expert
parallelism wait for it, but does not starve the others; it has a warning of its own.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from megalith.config import MoEConfig
from megalith.training.loop import Callback, FinishedStep
from megalith.training.routing import RoutingTotals
from megalith.training.run import Run
from megalith.transformer.moe.balance import LoadMetrics, load_metrics

__all__ = ["CollapseAlarm", "Sign", "experts_record", "sign_of_imbalance"]

log = logging.getLogger(__name__)

_MOST_LOADS = 64  # numbers per layer in a record
_PATIENCE = 5  # consecutive steps: one unusual batch is not a collapse, and experts recover from a few steps
_NEAR = 0.9  # share of the maximum of max violation
_EFFECTIVE_SHARE = 0.125  # share of the experts other than the K that a token needs
_FEWEST_CHOICES = 8  # per expert: with fewer, some experts get no token by chance
# the standard deviation of f = K / E over T tokens is binomial; at least this many of them must fit between f and 1
_FEWEST_DEVIATIONS = 6


def experts_record(totals: RoutingTotals) -> dict[str, Any]:
    """Returns the ``experts`` field of a step's record (see ``observe.metrics``); requires at least one layer."""
    layers = [_of_layer(layer, load, totals) for layer, load in totals.loads.items()]
    widths = totals.bias_ranges.values()
    names = next(iter(totals.losses.values()), {})
    return {
        "max_violation": max(each["max_violation"] for each in layers),
        "entropy": min(each["entropy"] for each in layers),
        "dead_experts": max(each["dead_experts"] for each in layers),
        **{name: math.fsum(losses[name] for losses in totals.losses.values()) / len(layers) for name in names},
        **({"bias_range": max(widths)} if widths else {}),
        "layers": layers,
    }


class Sign(NamedTuple):
    """Evidence that routing has collapsed or that one expert is hot, with its numbers as text."""

    kind: Literal["collapsed", "hot"]
    numbers: str


class CollapseAlarm(Callback):
    """Warns on rank 0, once per layer and kind, if loads have shown the same sign for five consecutive steps."""

    def __init__(self) -> None:
        self.steps_in_a_row: Counter[tuple[int, str]] = Counter()
        self.warned: set[tuple[int, str]] = set()

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if dist.get_rank() != 0:
            return
        steps_in_a_row: Counter[tuple[int, str]] = Counter()
        found: dict[str, list[str]] = {}
        for layer, load in finished.result.routing.loads.items():
            if (sign := sign_of_imbalance(load, run.task.routed_layers[layer])) is None:
                continue
            key = layer, sign.kind
            steps_in_a_row[key] = self.steps_in_a_row[key] + 1
            if steps_in_a_row[key] >= _PATIENCE and key not in self.warned:
                self.warned.add(key)
                found.setdefault(sign.kind, []).append(f"layer {layer}: {sign.numbers}")
        self.steps_in_a_row = steps_in_a_row
        for kind, layers in found.items():
            log.warning("step %d: %s", run.state.step, _WARNINGS[kind] % (_PATIENCE, "; ".join(layers)))


def sign_of_imbalance(load: Tensor, moe: MoEConfig) -> Sign | None:
    """Applies the rules above to the ``load`` [E] of a layer; None if it is fine, or if there are too few tokens."""
    E, K, num_choices = moe.num_experts, moe.top_k, int(load.sum())
    if num_choices < _FEWEST_CHOICES * E or num_choices * (E - K) < (_FEWEST_DEVIATIONS * K) ** 2:
        return None
    metrics = load_metrics(load)
    if (effective := math.exp(metrics.entropy)) < K + _EFFECTIVE_SHARE * (E - K):
        return Sign("collapsed", f"entropy {metrics.entropy:.2f}, as if {effective:.1f} of {E} experts were in use")
    if 2 * metrics.dead_experts > E:
        return Sign("collapsed", f"{metrics.dead_experts} of {E} experts received no tokens")
    if metrics.max_violation >= _NEAR * (E / K - 1):
        share = f"{(metrics.max_violation + 1) * K / E:.0%} of the tokens chose expert {int(load.argmax())}"
        if K == 1:  # there are no other choices
            return Sign("collapsed", share)
        return Sign("hot", f"{share}; with the other choices, it is as if {effective:.1f} of {E} experts were in use")
    return None


_WARNINGS: Mapping[str, str] = MappingProxyType(
    {
        "collapsed": "the routing has collapsed, now for %d steps in a row: %s. Experts that get no tokens learn "
        "nothing and rarely recover: stop, go back to an earlier checkpoint, and raise "
        "model.moe.router.sequence_balance (such as 0.01) or, with sigmoid scores, set "
        "model.moe.router.expert_bias_update_rate (such as 0.001); both need model.moe.router.selection=top_k. If "
        "logits grow, set model.moe.router.z_loss (such as 0.001) or lower optim.lr",
        "hot": "nearly every token has chosen the same expert for %d steps in a row: %s. The routing has not "
        "collapsed, but ranks of parallel.expert wait for that expert: raise model.moe.router.sequence_balance (such "
        "as 0.01) or, with sigmoid scores, set model.moe.router.expert_bias_update_rate (such as 0.001); both need "
        "model.moe.router.selection=top_k. If all tokens should share an expert, set model.moe.shared_ffn_hidden_size",
    }
)


def _of_layer(layer: int, load: Tensor, totals: RoutingTotals) -> dict[str, Any]:
    metrics: LoadMetrics = load_metrics(load)
    losses = totals.losses.get(layer, {})
    return {
        "layer": layer,
        "max_violation": metrics.max_violation,
        "entropy": metrics.entropy,
        "dead_experts": metrics.dead_experts,
        # top-level fields of a record may be NaN, fields inside lists may not
        "losses": {name: value if math.isfinite(value) else None for name, value in losses.items()},
        "bias_range": totals.bias_ranges.get(layer),
        **_relative(load.tolist()),
    }


def _relative(load: Sequence[int]) -> dict[str, list[float]]:
    """Divides ``load`` by its mean; for more than 64 experts, returns the mean and ``least`` of 64 ranges of them."""
    E, mean = len(load), max(sum(load), 1) / len(load)
    num_ranges = min(E, _MOST_LOADS)
    borders = [E * number // num_ranges for number in range(num_ranges + 1)]
    ranges = [load[first:after] for first, after in pairwise(borders)]
    found = {"load": [round(sum(each) / (len(each) * mean), 3) for each in ranges]}
    if num_ranges < E:
        found["least"] = [round(min(each) / mean, 3) for each in ranges]
    return found
