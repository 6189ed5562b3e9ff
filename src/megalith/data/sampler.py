"""Computes which samples a data-parallel rank reads from the position, the batch sizes and the layout.

    micro-batch m of rank r:  consumed + (m * dp_size + r) * b + [0, b)

The samples of a global batch do not depend on the number of ranks or on b. Megatron's sequential sampler distributes
them in the same way.
"""

from megalith.errors import ConfigError

__all__ = ["microbatch_sample_ids"]


def microbatch_sample_ids(
    consumed: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[range]:
    """The samples of this rank's micro-batches in the step that begins at sample ``consumed``, in order.

    Raises:
        ConfigError: the global batch is not a whole number of micro-batches on every rank.
    """
    together = micro_batch * dp_size
    if global_batch % together:
        raise ConfigError(
            f"global batch ({global_batch}) must be divisible by micro-batch ({micro_batch}) x data-parallel ranks "
            f"({dp_size})"
        )
    firsts = range(consumed + dp_rank * micro_batch, consumed + global_batch, together)
    return [range(first, first + micro_batch) for first in firsts]
