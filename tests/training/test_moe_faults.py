"""The layout suite detects seeded faults in experts: each shows as a difference."""

from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.moe_faults import MOE_FAULTS, Fault
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

IN_MAKE_TEST = (0, 7)


def first_steps_with(fault: Fault, tree: dict[str, Any]) -> Trajectory:
    with fault():
        return first_steps(tree, 2)


@pytest.mark.parametrize(
    ("fault", "parallel", "moe"),
    [
        pytest.param(*each, id=each[0].__name__, marks=() if number in IN_MAKE_TEST else pytest.mark.slow)
        for number, each in enumerate(MOE_FAULTS)
    ],
)
def test_a_mistake_with_experts_is_caught(fault, parallel, moe, tmp_path):
    model = {"model": {"moe": {"num_experts": 4, **moe}}, "train": {"micro_batch_size": 4}}
    tree = settings(tmp_path, **model)
    want = reference(tree)
    tree["parallel"] = parallel
    assert all(differences(found, want) == [] for found in ranks(2, first_steps, tree, 2))
    assert any(differences(found, want) for found in ranks(2, first_steps_with, fault, tree))
