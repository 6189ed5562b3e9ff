"""The number of micro-batches per step: the global batch size over micro_batch_size x data-parallel ranks.

The global batch size is a list of stages over the samples consumed so far, so that one integer tells a resumed run its
place. Every stage is checked when the calculator is constructed, not when it is reached.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from megalith.config import BatchSizeStage, RunConfig, batch_size_stages
from megalith.errors import ConfigError

__all__ = ["NumMicroBatchesCalculator", "build_num_microbatches_calculator", "rampup_stages"]


class NumMicroBatchesCalculator:
    """Computes the batch of a step from the number of samples that all ranks consumed before it.

    Args:
        stages: global batch sizes with the sample from which each applies; the first starts at 0.
        micro_batch_size: samples in one forward pass of one rank.
        data_parallel_size: ranks that read different samples.

    Raises:
        ConfigError: no stages, stages out of order, or batches that do not divide into whole micro-batches.
    """

    def __init__(self, stages: Sequence[BatchSizeStage], micro_batch_size: int, data_parallel_size: int) -> None:
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise ConfigError(
                "micro_batch_size and data_parallel_size must be at least 1; "
                f"got {micro_batch_size} and {data_parallel_size}"
            )
        first = [stage.first_sample for stage in stages]
        if first[:1] != [0] or any(later <= earlier for earlier, later in pairwise(first)):
            raise ConfigError(f"stages must begin at sample 0 and increase; they begin at {first}")
        self.stages = tuple(stages)
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        unit = micro_batch_size * data_parallel_size
        sizes = [stage.global_batch_size for stage in stages]
        if wrong := [size for size in sizes if size < 1 or size % unit]:
            raise ConfigError(
                f"global batch sizes {wrong} must be positive multiples of micro_batch_size ({micro_batch_size}) x "
                f"data-parallel ranks ({data_parallel_size}); use {[max(-(-size // unit), 1) * unit for size in wrong]}"
            )
        self._first_samples = first

    def global_batch_size(self, consumed_samples: int) -> int:
        """Returns the number of samples in the step that begins after ``consumed_samples``, over all ranks."""
        if consumed_samples < 0:
            raise ConfigError(f"consumed_samples must be at least 0; got {consumed_samples}")
        return self.stages[bisect_right(self._first_samples, consumed_samples) - 1].global_batch_size

    def num_microbatches(self, consumed_samples: int) -> int:
        """Returns the number of forward passes per rank in the step that begins after ``consumed_samples``."""
        return self.global_batch_size(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def consumed_after(self, num_steps: int) -> int:
        """Returns the number of samples in the first ``num_steps`` steps."""
        consumed = 0
        for stage, following in zip_longest(self.stages, self.stages[1:]):
            taken = num_steps
            if following is not None:  # a step may have passed over a whole stage
                left = max(following.first_sample - consumed, 0)
                taken = min(-(-left // stage.global_batch_size), num_steps)
            consumed += taken * stage.global_batch_size
            num_steps -= taken
        return consumed


def build_num_microbatches_calculator(config: RunConfig, data_parallel_size: int) -> NumMicroBatchesCalculator:
    """Builds the calculator of a run."""
    stages = batch_size_stages(config.train, config.data.seq_length)
    return NumMicroBatchesCalculator(stages, config.train.micro_batch_size, data_parallel_size)


def rampup_stages(start: int, increment: int, ramp_samples: int, global_batch_size: int) -> tuple[BatchSizeStage, ...]:
    """Returns stages that grow from ``start`` to ``global_batch_size`` by ``increment``, evenly over ``ramp_samples``.

    If ``ramp_samples`` is 0 or both sizes are equal, the batch size is constant. Equivalent to Megatron's
    ``--rampup-batch-size``, in integer arithmetic.

    Raises:
        ConfigError: sizes are not positive or out of order, or their difference is not a multiple of ``increment``.
    """
    if start < 1 or increment < 1 or ramp_samples < 0:
        raise ConfigError(
            f"a ramp needs start >= 1, increment >= 1 and samples >= 0; got {start}, {increment} and {ramp_samples}"
        )
    difference = global_batch_size - start
    if difference < 0 or difference % increment:
        raise ConfigError(
            f"global_batch_size ({global_batch_size}) must be start ({start}) plus a multiple of increment "
            f"({increment}); use {start + max(difference // increment, 0) * increment}"
        )
    steps = difference // increment
    if steps == 0 or ramp_samples == 0:
        return (BatchSizeStage(0, global_batch_size),)
    # size i starts at the first whole sample at or after i / steps of the ramp; of several at a sample, the last counts
    sizes = {-(-i * ramp_samples // steps): start + i * increment for i in range(steps + 1)}
    return tuple(BatchSizeStage(first, size) for first, size in sizes.items())
