"""sampler: the samples of a step do not depend on the layout, and the position is one integer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.data.sampler import microbatch_sample_ids
from megalith.errors import ConfigError


def step(consumed, global_batch, micro_batch, dp_size):
    """The samples of one step in the order of the global batch: micro-batch by micro-batch, rank by rank."""
    ranks = [microbatch_sample_ids(consumed, global_batch, micro_batch, rank, dp_size) for rank in range(dp_size)]
    return [sample for together in zip(*ranks, strict=True) for micro in together for sample in micro]


def test_ranks_take_turns_by_micro_batches():
    assert microbatch_sample_ids(100, 12, 2, 0, 3) == [range(100, 102), range(106, 108)]
    assert microbatch_sample_ids(100, 12, 2, 2, 3) == [range(104, 106), range(110, 112)]


@given(
    consumed=st.integers(0, 10**12),
    micro_batch=st.integers(1, 5),
    dp_size=st.integers(1, 8),
    num_micro_batches=st.integers(1, 5),
)
def test_a_step_is_the_next_samples_in_order_in_any_layout(consumed, micro_batch, dp_size, num_micro_batches):
    global_batch = num_micro_batches * micro_batch * dp_size
    assert step(consumed, global_batch, micro_batch, dp_size) == list(range(consumed, consumed + global_batch))


def test_a_run_resumed_in_another_layout_goes_on_where_it_was():
    layouts = [(1, 2), (2, 1), (4, 2), (1, 8), (2, 4), (8, 1)]  # (ranks, micro-batch), a different one each step
    seen = [sample for n, (ranks, micro_batch) in enumerate(layouts) for sample in step(8 * n, 8, micro_batch, ranks)]
    assert seen == list(range(48))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"global batch \(12\) .* micro-batch \(2\) x data-parallel ranks \(4\)"):
        microbatch_sample_ids(0, 12, 2, 0, 4)
