"""The benchmark of checkpoints: every way saves and loads the same state, and the table has their medians."""

import pytest
import torch

from benchmarks.checkpoints import CONTENDERS, PLAIN, Contender, Times, as_markdown, measured, state_of


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch.distributed.checkpoint
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_way_loads_what_it_has_saved(contender, tmp_path):
    times = measured(contender, state_of(1 << 20), tmp_path)
    assert 0.0 < times.waits <= times.complete
    assert times.load > 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_way_that_loads_other_values_is_refused(tmp_path):
    wrong = Contender("wrong", lambda state, folder: lambda: None, lambda into, folder: None)
    with pytest.raises(RuntimeError, match=r"wrong has loaded other values of model\.0, "):
        measured(wrong, state_of(1 << 10), tmp_path)


def test_the_state_is_weights_and_two_moments_of_the_size_that_was_asked_for():
    state = state_of(256 << 20)
    assert sum(tensor.nbytes for tensor in state.values()) == (256 << 20) // 12 * 12
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert {name.split(".")[0] for name in state} == {"model", "exp_avg", "exp_avg_sq"}


def test_the_table_compares_each_round_with_the_plain_file_of_that_round():
    found = {PLAIN: [Times(1, 1, 1), Times(2, 2, 1)], "ours": [Times(0.1, 2, 3), Times(0.3, 4, 5)]}
    table = as_markdown(found, 3 << 29, {"cpu": "a"}, "today")
    assert "Saving and loading 1.50 GiB in one process, today" in table
    assert "| ours | 0.20 | 3.00 | 0.50 | 4.00 |" in table
