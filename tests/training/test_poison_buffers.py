"""train.poison_buffers: no bit changes, and code that reads data before it arrives always gets NaN."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import NonFiniteError
from megalith.parallel.context.ring import _Arriving
from megalith.topology import collectives
from megalith.topology.inbox import Inbox
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory

POISONED = {"poison_buffers": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "context 2 x pipeline 2": (4, {"context": 2, "pipeline": 2}),
    "context 2 x tensor 2, sequence": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "pipeline 2 x shard 2, interleaved": (4, {"pipeline": 2, "virtual": 2, "shard": 2}),
    "tensor 2 x shard 2, sequence": (4, {"tensor": 2, "sequence": True, "shard": 2}),
    "context 4, two levels": (4, {"context": 4, "context_method": "two_level", "context_inner": 2}),
    "context 2, gathered": (2, {"context": 2, "context_method": "all_gather"}),
    "hybrid 2 x 2": (4, {"replicate": 2, "shard": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2, zb_v, tied, recompute": (2, {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}),
}
MORE: dict[str, dict[str, Any]] = {
    "pipeline 2, zb_v, tied, recompute": {
        "model": {"tie_word_embeddings": True},
        "train": {"recompute": "full", "micro_batch_size": 1},
    }
}
IN_MAKE_TEST = list(LAYOUTS)[:1]


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    try:
        return first_steps(tree, world_size)
    finally:  # the ranks run other tests after this one
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_MAKE_TEST else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_it_changes_no_bit_of_loss_gradients_and_weights(name, tmp_path):
    world_size, parallel = LAYOUTS[name]
    more = MORE.get(name, {})
    model = {"num_layers": 4, **more.get("model", {})}
    tree = settings(tmp_path, parallel=parallel, model=model, train=more.get("train", {}))
    plain = ranks(world_size, steps, tree, world_size)
    poisoned = ranks(world_size, steps, {**tree, "train": tree["train"] | POISONED}, world_size)
    for got, want in zip(poisoned, plain, strict=True):
        assert (got.losses, got.norms) == (want.losses, want.norms)
        for these, those in zip([*got.gradients, got.final], [*want.gradients, want.final], strict=True):
            assert all(torch.equal(these[name], those[name]) for name in those)


def hasty_ring(arriving: _Arriving) -> list[Tensor]:
    """Everything happens to have arrived when it is read, although no inbox was opened."""
    for work in arriving.works:
        work.wait()
    return [inbox.message for inbox in arriving.received]


def hasty_link(inbox: Inbox) -> Tensor:
    return inbox.message


def forgotten(*args: Any, **kwargs: Any) -> None:
    """A collective that nobody starts; it looks like one that has ended."""


FSDP_GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)  # by torch version
SEQUENCE = {"tensor": 2, "sequence": True}
FAULTS: dict[str, tuple[object, str, Callable[..., Any], dict[str, Any]]] = {
    "a ring that does not wait": (_Arriving, "wait", hasty_ring, {"context": 2}),
    "a link of a pipeline that does not wait": (Inbox, "opened", hasty_link, {"pipeline": 2}),
    "an all-gather that is not made": (collectives, "all_gather_into", forgotten, SEQUENCE),
    "a reduce-scatter that is not made": (collectives, "reduce_scatter_into", forgotten, SEQUENCE),
    "weights that FSDP2 does not gather": (dist, FSDP_GATHER, forgotten, {"shard": 2}),
}


def outcome(fault: str, tree: dict[str, Any]) -> str:
    """How the first step with ``fault`` ends on this rank."""
    place, name, instead, _ = FAULTS[fault]
    with patch.object(place, name, instead):
        try:
            steps(tree, 2)
        except NonFiniteError as error:
            return str(error)
    return "the step was taken"


@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_reads_too_early_ends_in_nan(fault, tmp_path):
    tree = settings(tmp_path, parallel=FAULTS[fault][3], train=POISONED)
    for message in ranks(2, outcome, fault, tree):
        assert "step 1: loss nan" in message
