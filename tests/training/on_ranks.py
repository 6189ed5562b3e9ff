"""The first steps of a run as Megalith computes them, on this rank of any process group."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megalith.config import load_run
from megalith.parallel.parameters import declared_parameters
from megalith.topology.agreement import all_gather
from megalith.training.resume import resume_or_load
from megalith.training.run import Run
from megalith.training.setup import RunParts, build_run
from megalith.training.step import local_counts, sum_totals, train_step
from tests.training.reference import Trajectory


def first_steps(tree: dict[str, Any], world_size: int, num_steps: int = 2, **parts: Any) -> Trajectory:
    """Builds the run on every rank and takes its first steps; the tensors are gathered from all ranks.

    ``parts`` are the fields of ``RunParts``, except that ``task`` is a class, constructed from the settings.
    """
    config = load_run(tree, world_size=world_size)
    if "task" in parts:
        parts["task"] = parts["task"](config)
    run = build_run(config, torch.device("cpu"), RunParts(**parts))
    if config.load is not None:
        resume_or_load(run)
    found = Trajectory(initial=_weights(run))
    update = run.optimizer.step

    def recording_step() -> None:
        found.gradients.append({name: _whole(p.grad) for name, p, _ in declared_parameters(*run.chunks)})
        update()

    run.optimizer.step = recording_step
    for _ in range(num_steps):
        consumed = run.state.consumed_samples
        sizes = run.microbatches.global_batch_size(consumed), run.config.train.micro_batch_size
        micro_batches = run.loader.batch(consumed, *sizes)
        result = train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    found.final = _weights(run)
    return _of_all_stages(found)


def _of_all_stages(mine: Trajectory) -> Trajectory:
    """``mine`` plus the tensors of other ranks' stages."""
    for tensors in (mine.initial, mine.final, *mine.gradients):
        for found in all_gather(dict(tensors)):
            for name, tensor in found.items():
                tensors.setdefault(name, tensor)
    return mine


def _weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: _whole(tensor) for name, tensor in run.weights().items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
