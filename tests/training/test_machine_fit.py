"""training/machine_fit: only what certainly does not fit is refused, with both numbers."""

from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.training import machine_fit, process_group
from megalith.training.machine_fit import check_machine, rank_state_bytes, state_bytes
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.torchrun_environment import launched_rank
from tests.rank_pool import ranks
from tests.tiny_run import settings


@pytest.fixture
def config(tmp_path):
    return load_run(settings(tmp_path))


def needed(config):
    return state_bytes(config, task_of(config).num_parameters).total


def test_the_state_is_weights_gradients_and_moments_in_float32_or_wider(config):
    parameters = task_of(config).num_parameters
    assert needed(config) == 4 * 8 * parameters  # the tiny run computes in float64
    for dtype, optimizer, bytes_each in (("bfloat16", "adamw", 16), ("float32", "sgd", 12)):
        precision = config.precision.model_copy(update={"dtype": dtype})
        changed = config.model_copy(
            update={"precision": precision, "optim": config.optim.model_copy(update={"name": optimizer})}
        )
        assert needed(changed) == bytes_each * parameters


@pytest.mark.parametrize(
    ("layout", "world_size", "num_local_ranks", "share"),
    [
        ({}, 1, 1, 1.0),
        ({"shard": 2}, 2, 2, 1.0),  # two halves on one machine
        ({"shard": 4, "tensor": 2}, 8, 2, 0.25),  # two of eight parts; the rest is on other machines
        ({"shard": 2, "context": 2}, 4, 1, 0.25),  # context ranks share the weights as well
        ({"replicate": 2}, 2, 2, 2.0),
        ({"replicate": 2}, 2, 1, 1.0),
    ],
)
def test_what_ranks_on_this_machine_hold_together_must_fit(
    layout, world_size, num_local_ranks, share, config, monkeypatch
):
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=layout)})
    takes = int(needed(config) * share)
    monkeypatch.setattr(process_group.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes)
    check_machine(config, world_size, range(num_local_ranks))
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes - 16)
    with pytest.raises(ConfigError, match=r"does not fit: .* take [\d.]+\wB on .*, and it has [\d.]+\wB; use"):
        check_machine(config, world_size, range(num_local_ranks))
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: None)
    check_machine(config, world_size, range(num_local_ranks))


@pytest.mark.parametrize(("layout", "world_size"), [({}, 1), ({"shard": 2}, 2), ({"replicate": 2}, 2)])
def test_copies_for_saving_beside_training_must_fit_too(layout, world_size, config, monkeypatch):
    checkpoint = config.checkpoint.model_copy(update={"every": 2, "async_save": True})
    parallel = config.parallel.model_copy(update=layout)
    config = config.model_copy(update={"parallel": parallel, "checkpoint": checkpoint})
    # three of the four parts of a state are saved: weights and two moments; replicas share them
    takes = needed(config) * layout.get("replicate", 1) + needed(config) * 3 // 4
    monkeypatch.setattr(process_group.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes)
    check_machine(config, world_size, range(world_size))
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes - 16)
    with pytest.raises(
        ConfigError, match=r"checkpoint.async_save keeps in CPU memory does not fit: with it, .* needs? "
    ):
        check_machine(config, world_size, range(world_size))


def allocated(tree: dict[str, Any], world_size: int) -> int:
    """Bytes of this rank's weights and moments, and of gradients as large as the weights."""
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in (*run.tensors().values(), *run.weights().values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2},
        {"pipeline": 2, "stage_layers": [3, 1]},
        {"pipeline": 2, "virtual": 2},
        {"pipeline": 2, "virtual": 2, "schedule": "zb_v"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_of_a_pipeline_holds_what_its_stages_have(parallel, tied, tmp_path):
    model = {"num_layers": 4, "tie_word_embeddings": tied}
    tree = settings(tmp_path, parallel=parallel, model=model)
    config = load_run(tree, world_size=2)
    told = [held.total for held in rank_state_bytes(config, task_of(config), 2)]
    if tied and config.parallel.schedule == "zb_v":
        # rank 0 has the embedding twice: a weight and a gradient without moments, and not among the named tensors
        told[0] -= 2 * 8 * config.model.vocab_size * config.model.hidden_size
    assert ranks(2, allocated, tree, 2) == told


@pytest.mark.parametrize(("local_ranks", "held"), [(range(4), [0, 0, 1, 1]), (range(2), [0, 0]), (range(2, 4), [1, 1])])
def test_a_machine_must_have_memory_for_the_stages_of_its_own_ranks(local_ranks, held, tmp_path, monkeypatch):
    config = load_run(settings(tmp_path, parallel={"tensor": 2, "pipeline": 2}), world_size=4)
    by_stage = [held.total for held in rank_state_bytes(config, task_of(config), 4)]
    assert by_stage[0] < by_stage[1]  # a norm before the head
    takes = sum(by_stage[stage] for stage in held)
    monkeypatch.setattr(process_group.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes)
    check_machine(config, 4, local_ranks)
    monkeypatch.setattr(machine_fit, "memory_bytes", lambda: takes - 1)
    with pytest.raises(ConfigError, match="does not fit"):
        check_machine(config, 4, local_ranks)


def test_a_launched_rank_knows_the_ranks_of_its_machine():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launched_rank(environment).local_ranks == range(4, 8)
    assert launched_rank({"RANK": "5", "WORLD_SIZE": "8"}).local_ranks == range(5, 6)


class Device:
    def __init__(self, total_memory):
        self.total_memory = total_memory


def test_on_gpus_each_rank_has_one_and_its_part_must_fit_there(config, monkeypatch):
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard": 2})})
    half = needed(config) // 2
    monkeypatch.setattr(machine_fit, "choose_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device(half))
    check_machine(config, 2, range(2))
    with pytest.raises(ConfigError, match="this machine has 3 ranks and 2 GPUs, but each rank needs a GPU of its own"):
        check_machine(
            config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard": 3})}), 3, range(3)
        )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device(half - 16))
    with pytest.raises(ConfigError, match=r"on one rank, without activations, and its GPU has"):
        check_machine(config, 2, range(2))


def test_a_rank_more_than_there_are_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert process_group.choose_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK \(1\) must be below the number of GPUs that this process sees \(1\)"
    ):
        process_group.choose_device()


def test_ranks_without_a_local_rank_are_refused_unless_each_sees_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert process_group.choose_device() == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        ConfigError, match="LOCAL_RANK is not, so that all ranks of a machine would use the first of its 4"
    ):
        process_group.choose_device()
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert process_group.choose_device() == torch.device("cuda", 2)
