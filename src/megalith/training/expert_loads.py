"""How even the loads of experts are: the numbers of a step's record, and an alarm where routing collapses.

Routing has collapsed where nearly all tokens go to the same experts. The others get no gradient then, and do not come
back by themselves.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megalith.config import MoEConfig
from megalith.training.loop import Callback, FinishedStep
from megalith.training.routing import RoutingTotals
from megalith.training.run import Run
from megalith.transformer.moe.balance import LoadMetrics, load_metrics

__all__ = ["CollapseAlarm", "experts_record", "sign_of_collapse"]

log = logging.getLogger(__name__)

_MOST_LOADS = 64  # numbers of a layer in a record
_PATIENCE = 5  # steps in a row: a rare batch is no collapse, and gradients of few steps can be made up for
_NEAR = 0.9  # of the greatest max violation
_EFFECTIVE_SHARE = 0.125  # of the experts besides the K that a token needs
_FEWEST_CHOICES = 8  # for each expert: fewer leave some experts without a token by chance


def experts_record(totals: RoutingTotals) -> dict[str, Any]:
    """The field ``experts`` of a step's record, as ``observe.metrics`` describes it; there must be a layer."""
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


class CollapseAlarm(Callback):
    """Warns, once for each layer, where routing has been collapsed for five steps in a row; on rank 0."""

    def __init__(self) -> None:
        self.steps_in_a_row: Counter[int] = Counter()
        self.warned: set[int] = set()

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if dist.get_rank() != 0:
            return
        found = {}
        for layer, load in finished.result.routing.loads.items():
            sign = sign_of_collapse(load, run.task.routed_layers[layer])
            self.steps_in_a_row[layer] = self.steps_in_a_row[layer] + 1 if sign else 0
            if sign and self.steps_in_a_row[layer] >= _PATIENCE and layer not in self.warned:
                found[layer] = sign
        self.warned |= found.keys()
        if found:
            log.warning("%s", _warning(run.state.step, found))


def sign_of_collapse(load: Tensor, moe: MoEConfig) -> str | None:
    """What shows that the routing of a layer with this ``load`` [E] has collapsed, in numbers; None if nothing does."""
    E, K = moe.num_experts, moe.top_k
    if int(load.sum()) < _FEWEST_CHOICES * E or E == K:
        return None
    metrics = load_metrics(load)
    if metrics.max_violation >= _NEAR * (E / K - 1):
        return f"max violation {metrics.max_violation:.2f}, where {E / K - 1:.2f} is the greatest possible"
    if 2 * metrics.dead_experts > E:
        return f"{metrics.dead_experts} of {E} experts were chosen by no token"
    if (effective := math.exp(metrics.entropy)) < K + _EFFECTIVE_SHARE * (E - K):
        return f"entropy {metrics.entropy:.2f}, as if {effective:.1f} of {E} experts were in use"
    return None


def _warning(step: int, found: dict[int, str]) -> str:
    where = "; ".join(f"layer {layer}: {sign}" for layer, sign in found.items())
    return (
        f"step {step}: the routing has collapsed, for {_PATIENCE} steps now: {where}. Experts that get no token learn "
        "nothing and rarely come back: stop, go back to an earlier checkpoint, and raise "
        "model.moe.router.sequence_balance (such as 0.01) or, with sigmoid scores, set "
        "model.moe.router.expert_bias_update_rate (such as 0.001); if logits grow, set model.moe.router.z_loss "
        "(such as 0.001) or lower optim.lr"
    )


def _of_layer(layer: int, load: Tensor, totals: RoutingTotals) -> dict[str, Any]:
    metrics: LoadMetrics = load_metrics(load)
    losses = totals.losses.get(layer, {})
    return {
        "layer": layer,
        "max_violation": metrics.max_violation,
        "entropy": metrics.entropy,
        "dead_experts": metrics.dead_experts,
        # a record's own fields may be NaN, those of lists may not
        "losses": {name: value if math.isfinite(value) else None for name, value in losses.items()},
        "bias_range": totals.bias_ranges.get(layer),
        "load": _relative(load.tolist()),
    }


def _relative(load: Sequence[int]) -> list[float]:
    """``load`` divided by its mean, of at most 64 ranges of experts, as even as they can be, the mean of each."""
    E, mean = len(load), max(sum(load), 1) / len(load)
    num_ranges = min(E, _MOST_LOADS)
    borders = [E * number // num_ranges for number in range(num_ranges + 1)]
    ranges = [load[first:after] for first, after in pairwise(borders)]
    return [round(sum(each) / (len(each) * mean), 3) for each in ranges]
