"""One optimizer step: agree, forward and backward over micro-batches, reduce, decide, update.

The loss of the step is  sum over all ranks and micro-batches of (loss * mask)  /  number of masked-in tokens.  That
number is summed before the first backward and enters as the seed of every backward; nothing else divides, so that a
gradient does not depend on how the batch was cut. Two small all-reduces a step carry all that ranks must agree on:

    before  [tokens with a loss, ranks that were asked to stop, ranks that could not read their batch]
    after   [squared gradient norm, loss sum]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.data.loader import MicroBatch
from megalith.errors import NonFiniteError
from megalith.optim.grad_norm import clip_coefficient, local_squared_norm, scale_gradients_
from megalith.parallel.parameters import declared_parameters
from megalith.parallel.sharding.fsdp import gradient_sync
from megalith.topology.agreement import everywhere
from megalith.training.loss import loss_sum
from megalith.training.run import Run

__all__ = ["Agreement", "StepResult", "agree", "train_step"]


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before a step begins.

    num_tokens: how many have a loss; stop: a rank was asked to stop; failed: a rank could not read its batch.
    """

    num_tokens: int
    stop: bool
    failed: bool = False


@dataclass(frozen=True)
class StepResult:
    """loss: the mean over the step's tokens, in nats; grad_norm: before clipping; skipped: the weights did not move."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    skipped: bool


def agree(run: Run, micro_batches: Sequence[MicroBatch], stop: bool, failed: bool = False) -> Agreement:
    """Sums this step's token count over data-parallel ranks; one rank's wish to stop, or failure, reaches all."""
    # ranks of one tp group read the same rows: the first speaks for them
    num_tokens = sum(int(micro.loss_mask.sum()) for micro in micro_batches) if run.pg_collection.tp_rank == 0 else 0
    told = torch.tensor([num_tokens, int(stop), int(failed)], dtype=torch.int64, device=run.device)
    dist.all_reduce(told)
    return Agreement(int(told[0]), bool(told[1]), bool(told[2]))


def train_step(run: Run, micro_batches: Sequence[MicroBatch], num_tokens: int) -> StepResult:
    """Runs one step and advances ``run``'s weights, optimizer, schedule and counters.

    Raises:
        NonFiniteError: on every rank, when the loss or the gradient is not finite and the run is not told to skip.
    """
    scale = 1.0 if run.loss_scale is None else run.loss_scale.scale
    with run.timers("forward-backward"):
        total = _forward_backward(run, micro_batches, scale / max(1, num_tokens))
    parameters = list(run.model.parameters())
    with run.timers("gradient norm"):
        loss, grad_norm = _reduce(run, total, local_squared_norm(parameters))
    loss, grad_norm = loss / max(1, num_tokens), grad_norm / scale
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    if not finite:
        _refuse(run, loss, grad_norm)
    with run.timers("optimizer"):
        if finite:
            scale_gradients_(parameters, clip_coefficient(grad_norm, run.clip_norm) / scale)
            run.optimizer.step()
        run.optimizer.zero_grad()
    lr = run.scheduler.lr
    if finite:
        run.scheduler.step(1)
    if run.loss_scale is not None:
        run.loss_scale.update(not finite)
    run.state.step += 1
    run.state.consumed_samples += run.microbatches.global_batch_size(run.state.consumed_samples)
    run.state.consumed_tokens += num_tokens
    run.state.skipped_steps += not finite
    return StepResult(loss, grad_norm, lr, num_tokens, not finite)


def _forward_backward(run: Run, micro_batches: Sequence[MicroBatch], seed: float) -> Tensor:
    """Accumulates the gradient of ``seed`` times the loss sum, and returns this rank's loss sum in float64."""
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for index, micro_batch in enumerate(micro_batches):
        gradient_sync(run.model, last=index == len(micro_batches) - 1)
        loss = loss_sum(run.model, run.make_inputs(micro_batch, run.state.step))
        (loss * seed).backward()
        total += loss.detach()
    return total


def _reduce(run: Run, total: Tensor, squared_norm: Tensor) -> tuple[float, float]:
    """The loss sum of the global batch and the norm of its gradient."""
    mine = total if run.pg_collection.tp_rank == 0 else torch.zeros_like(total)
    sums = torch.stack((mine, squared_norm.to(run.device)))
    dist.all_reduce(sums)
    loss, squares = sums.tolist()
    return loss, math.sqrt(squares) if squares >= 0.0 else math.nan


def _refuse(run: Run, loss: float, grad_norm: float) -> None:
    """Raises, on every rank, unless the run may skip this step."""
    scale = run.loss_scale
    if scale is not None and scale.scale > scale.smallest:
        return  # an overflow that a smaller scale may cure
    if run.nonfinite == "skip":
        return
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, _nonfinite_names(run.model))
    where = [f"{name} on rank {rank}" for rank, names in enumerate(found) for name in names[:2]]
    text = (
        f"step {run.state.step + 1}: loss {loss}, gradient norm {grad_norm}; not finite: "
        f"{', '.join(where[:6]) or 'the loss alone'}. The weights are those of step {run.state.step}. Lower optim.lr, "
        "or set train.nonfinite=skip to pass over such batches"
    )
    raise everywhere(NonFiniteError(text))


def _nonfinite_names(model: nn.Module) -> list[str]:
    names = []
    for name, parameter, _ in declared_parameters(model):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            names.append(name)
    return names
