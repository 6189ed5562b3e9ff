"""Relative positions as a bias on attention scores, with one table for all layers of a stack.

    score(i, j) = scale q_i . k_j + table[bucket(j - i), head]

In each direction, half of the buckets hold one distance each; the others grow by a constant factor up to
``max_distance``. A bidirectional stack has half of the buckets for each direction, a causal stack all for the past.

Raffel et al. 2019, "T5", arXiv:1910.10683, section 2.1; rounding follows its released code, in float32.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.config import RelativePositionConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.relative_bias import bias_between
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local

__all__ = ["PositionBias", "RelativePositionBias", "relative_position_bucket"]


def relative_position_bucket(distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket, int64 in [0, num_buckets), of each ``distance``, int64: key position minus query position."""
    bucket = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        bucket = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    num_exact = num_buckets // 2
    # the logarithm of distance 0 is infinite, but its result is not used
    octaves = torch.log(distance.float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (octaves.clamp(min=0.0) * (num_buckets - num_exact)).long()
    return bucket + torch.where(distance < num_exact, distance, far.clamp(max=num_buckets - 1))


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The bias that a stack adds to the scores of all its layers in one forward.

    Attributes:
        by_distance: [A/tp, 2P - 1], for keys from P - 1 tokens before a query to P - 1 after it.
        whole: [A/tp, Sq, Sk] for the last Sq of Sk = P positions; None if rows are split over cp, where it is built one
            block at a time.
    """

    by_distance: Tensor
    whole: Tensor | None


class RelativePositionBias(DeclaringModule):
    """The table [num_buckets, A] of one stack, with heads split over tp.

    Args:
        config: the buckets.
        num_heads: A.
        options: groups and dtype.
        bidirectional: whether keys after a query have separate buckets.
        std: standard deviation of the initial values.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: RelativePositionConfig,
        num_heads: int,
        options: BuildOptions,
        *,
        bidirectional: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.config, self.options, self.bidirectional = config, options, bidirectional
        spec = ParameterSpec((config.num_buckets, num_heads), "normal", std, split={"tp": 1})
        self.declare("weight", spec, options.pg_collection, options.dtype)

    def forward(self, num_queries: int, num_keys: int) -> PositionBias:
        """Returns the bias for the last ``num_queries`` of ``num_keys`` positions; counts whole rows, also under cp."""
        weight = local(self.weight)
        distance = torch.arange(1 - num_keys, num_keys, device=weight.device)
        buckets = relative_position_bucket(
            distance,
            bidirectional=self.bidirectional,
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
        )
        by_distance = nn.functional.embedding(buckets, weight).t()  # [A/tp, 2 Sk - 1]
        if self.options.pg_collection.size("cp") > 1:
            return PositionBias(by_distance, None)
        whole = bias_between(by_distance, range(num_keys - num_queries, num_keys), range(num_keys))
        return PositionBias(by_distance, whole)
