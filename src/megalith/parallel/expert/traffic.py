"""What a rank exchanges to send tokens to experts and receive their outputs, for one batch of a layer.

    all_to_all   ep: numbers of rows, int32 [E]; rows and their weights; the experts' outputs
                 etp: the same numbers from all its ranks; all their rows and weights; partial sums of outputs
    all_gather   ep, then etp: tokens, indices and weights are gathered, and the outputs reduce-scattered

The backward sends the gradients of rows, weights and outputs in the opposite direction. If rows are padded to the
capacity, their numbers need not be exchanged. The bytes of a dropless exchange depend on the routing (``Rows``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.parallel.traffic import Axis, Passes, Traffic, collective, repeated

__all__ = ["Dispatch", "Rows", "all_gather_traffic", "all_to_all_traffic"]

_INT32, _INT64 = 4, 8


@dataclass(frozen=True)
class Rows:
    """The numbers of rows of a rank in an all-to-all.

    Attributes:
        sent: to all ranks of ep, including itself.
        received: from all ranks of ep.
        gathered: the sum of ``received`` over the ranks of its etp group.
    """

    sent: int
    received: int
    gathered: int

    @classmethod
    def even(cls, num_rows: int, etp_size: int) -> "Rows":
        """Returns the numbers if every rank sends and receives ``num_rows``."""
        return cls(num_rows, num_rows, num_rows * etp_size)

    @classmethod
    def of_loads(cls, loads: Sequence[Sequence[Sequence[int]]], ep_rank: int, etp_rank: int) -> "Rows":
        """Returns the numbers for ``loads`` [etp][ep][E], how many tokens of each rank go to each expert."""
        ep_size, E = len(loads[0]), len(loads[0][0])
        here = slice(ep_rank * E // ep_size, (ep_rank + 1) * E // ep_size)
        arriving = [sum(sum(of_rank[here]) for of_rank in of_etp) for of_etp in loads]
        return cls(sum(loads[etp_rank][ep_rank]), arriving[etp_rank], sum(arriving))


@dataclass(frozen=True)
class Dispatch:
    """The sizes of an exchange.

    Attributes:
        ep_size, etp_size: ranks over which experts are distributed, and over which each expert is split.
        num_experts, top_k: E and K.
        row_bytes: of a token's features, or of its latent.
        weight_bytes: of a routing weight.
    """

    ep_size: int
    etp_size: int
    num_experts: int
    top_k: int
    row_bytes: int
    weight_bytes: int


def all_to_all_traffic(dispatch: Dispatch, rows: Rows, *, padded: bool) -> Passes:
    """Returns what the all-to-all dispatch exchanges; ``padded``: the numbers of rows are known and not exchanged."""
    ep, etp = dispatch.ep_size, dispatch.etp_size
    # the larger of input and output
    over_ep, over_etp = max(rows.sent, rows.received), max(rows.received * etp, rows.gathered)
    features = collective("expert", "all_to_all", over_ep * dispatch.row_bytes, ep)
    features += collective("expert_tensor", "all_to_all", over_etp * dispatch.row_bytes, etp)
    weights = collective("expert", "all_to_all", over_ep * dispatch.weight_bytes, ep)
    weights += collective("expert_tensor", "all_to_all", over_etp * dispatch.weight_bytes, etp)
    there_and_back = repeated(features, 2) + weights
    if padded:
        return Passes(there_and_back, there_and_back)
    numbers = collective("expert", "all_to_all", dispatch.num_experts * _INT32, ep)
    numbers += collective("expert_tensor", "all_gather", dispatch.num_experts * _INT32 * etp, etp)
    return Passes(numbers + there_and_back, there_and_back)


def all_gather_traffic(dispatch: Dispatch, num_tokens: int) -> Passes:
    """Returns what the all-gather dispatch exchanges for ``num_tokens`` per rank, over ep and then etp."""
    forward = backward = Traffic()
    tokens = num_tokens
    axes: tuple[tuple[Axis, int], ...] = (("expert", dispatch.ep_size), ("expert_tensor", dispatch.etp_size))
    for axis, size in axes:
        tokens *= size
        features, weights = tokens * dispatch.row_bytes, tokens * dispatch.top_k * dispatch.weight_bytes
        gathered = collective(axis, "all_gather", features, size) + collective(axis, "all_gather", weights, size)
        scattered = collective(axis, "reduce_scatter", features, size)
        forward = forward + gathered + scattered
        forward = forward + collective(axis, "all_gather", tokens * dispatch.top_k * _INT64, size)
        backward = backward + scattered + collective(axis, "all_gather", features, size)
        backward = backward + collective(axis, "reduce_scatter", weights, size)
    return Passes(forward, backward)
