"""One optimizer step: sum counts, forward and backward over micro-batches, reduce, check, update.

The loss of the step is the sum over the task's terms of  weight * (sum of the term) / (count of the term), with sums
and counts taken over all ranks and micro-batches.  Counts are summed before the first backward and enter its seed.
There is no other division, so the gradient does not depend on how the batch is split. Two small all-reduces per step
carry everything that the ranks must agree on:

    before  [count of each term, ranks that were asked to stop, ranks with an error]
    after   [sum of each term, squared gradient norm, loads and balance losses of layers with experts]
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.errors import NonFiniteError
from megalith.optim.grad_norm import clip_coefficient, local_squared_norm, scale_gradients_
from megalith.parallel.parameters import declared_parameters
from megalith.topology.agreement import all_gather, everywhere
from megalith.training.batch import inputs_for
from megalith.training.joint_loss import joint_loss
from megalith.training.routing import RoutingTotals, routing_sums, routing_totals, update_routers_
from megalith.training.run import Run
from megalith.training.tasks.task import JointTask
from megalith.transformer.step_record import StepRecord

__all__ = ["StepResult", "StepTotals", "local_counts", "sum_totals", "train_step", "weighted_mean"]


@dataclass(frozen=True)
class StepTotals:
    """What all ranks know before a step begins.

    ``counts``: the count of each loss term over the global batch; ``stop``: some rank was asked to stop; ``failed``:
    some rank has an error, from reading its batch or since the last step.
    """

    counts: Mapping[str, int]
    stop: bool
    failed: bool = False


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        loss: weighted sum of the terms, in their unit (nats); ``terms``: the unweighted mean of each term.
        grad_norm: before clipping.
        num_samples: in the global batch.
        skipped: the weights were not updated.
        routing: what the routers did, if the model has any.
    """

    loss: float
    terms: Mapping[str, float]
    grad_norm: float
    lr: float
    num_samples: int
    skipped: bool
    routing: RoutingTotals


def local_counts(run: Run, micro_batches: Sequence[Any]) -> dict[str, int]:
    """Returns this rank's contribution to the count of each loss term; 0 if another rank speaks for its tokens."""
    found = [run.task.counts(micro) for micro in micro_batches] if run.pg_collection.speaks_for_tokens else []
    return {name: sum(counts[name] for counts in found) for name in run.task.terms}


def sum_totals(run: Run, counts: Mapping[str, int], stop: bool, failed: bool = False) -> StepTotals:
    """Sums this step's ``counts`` over all ranks, and combines ``stop`` and ``failed`` over them with a logical OR."""
    here = [counts.get(name, 0) for name in run.task.terms]
    reduced = torch.tensor([*here, int(stop), int(failed)], dtype=torch.int64, device=run.device)
    dist.all_reduce(reduced)
    *sums, stops, failures = reduced.tolist()
    return StepTotals(dict(zip(run.task.terms, sums, strict=True)), bool(stops), bool(failures))


def train_step(run: Run, micro_batches: Sequence[Any], counts: Mapping[str, int]) -> StepResult:
    """Runs one step and advances ``run``'s weights, optimizer, schedule and counters.

    Raises:
        NonFiniteError: on every rank, if the loss or the gradient is not finite and the run does not skip such steps.
    """
    scale = 1.0 if run.loss_scale is None else run.loss_scale.scale
    coefficients = {name: weight * scale / max(1, counts[name]) for name, weight in run.task.terms.items()}
    num_micro_batches = len(micro_batches) * run.pg_collection.size("dp")  # over all ranks
    record = StepRecord(scale / num_micro_batches)
    with run.timers("forward-backward"):
        sums = _forward_backward(run, micro_batches, coefficients, record)
    parameters = run.parameters()
    with run.timers("gradient norm"):
        squared_norm = local_squared_norm(run.counted_parameters()).view(1)
        routing = routing_sums(run.task.routed_layers, run.chunks, record, run.device)
        terms, grad_norm, of_routers = _reduce(run, sums, squared_norm, routing)
    terms = {name: value / max(1, counts[name]) for name, value in terms.items()}
    loss, grad_norm = weighted_mean(run.task.terms, terms), grad_norm / scale
    totals = routing_totals(run.task.routed_layers, of_routers, num_micro_batches)
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    if not finite:
        _refuse(run, loss, grad_norm)
    with run.timers("optimizer"):
        if finite:
            scale_gradients_(parameters, clip_coefficient(grad_norm, run.config.optim.clip_norm) / scale)
            run.optimizer.step()
            update_routers_(run.chunks, totals)
        run.optimizer.zero_grad()
    lr = run.scheduler.lr
    if finite:
        run.scheduler.step(1)
    if run.loss_scale is not None:
        run.loss_scale.update(not finite)
    num_samples = run.microbatches.global_batch_size(run.state.consumed_samples)
    run.state.step += 1
    run.state.consumed_samples += num_samples
    run.state.skipped_steps += not finite
    return StepResult(loss, terms, grad_norm, lr, num_samples, not finite, totals)


def weighted_mean(weights: Mapping[str, float], means: Mapping[str, float]) -> float:
    """Returns the loss: the sum of the terms' ``means``, each times its weight."""
    return math.fsum(weight * means[name] for name, weight in weights.items())


def _forward_backward(
    run: Run, micro_batches: Sequence[Any], coefficients: Mapping[str, float], record: StepRecord
) -> Tensor:
    """Accumulates the gradient of the sums times ``coefficients``; returns this rank's sums [terms] in float64.

    The sums are zero on ranks without the last stage.
    """
    total = torch.zeros(len(coefficients), dtype=torch.float64, device=run.device)
    joint = joint_loss(run, micro_batches, coefficients)
    if joint is not None and joint.sums:
        total.add_(torch.stack([joint.sums[name].double() for name in coefficients]))
    inputs_of = inputs_for(run.task, micro_batches, run.state.step, run.device, run.chunks[-1])

    def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        inputs = run.task.with_record(inputs_of(model, micro_batch), record.micro_batch(micro_batch))
        output = run.task.forward(model, inputs, hidden)
        if not run.pipeline.holds_output(model):
            assert isinstance(output, Tensor), "all stages but the last output a tensor"
            return output
        if joint is not None:
            return joint.seed(output, micro_batch)
        sums = _sums(run, output, inputs)
        total.add_(torch.stack([sums[name].detach().double() for name in coefficients]))
        first, *others = (sums[name] * coefficient for name, coefficient in coefficients.items())
        return sum(others, start=first)

    run.pipeline.train(
        len(micro_batches), forward, lambda index: run.task.hidden_shape(micro_batches[index], run.options)
    )
    return total


def _sums(run: Run, output: Any, inputs: Any) -> Mapping[str, Tensor]:
    """Returns the sums of a micro-batch, compared with those of other ranks if the task compares samples."""
    if isinstance(run.task, JointTask):
        return run.task.joint_sums([output], [run.task.compared(inputs)], run.pg_collection)
    return run.task.sums(output, inputs)


def _reduce(
    run: Run, sums: Tensor, squared_norm: Tensor, routing: Tensor
) -> tuple[dict[str, float], float, list[float]]:
    """Returns the terms' sums over the global batch, its gradient norm, and the sums of ``routing`` over all ranks."""
    mine = sums if run.pg_collection.speaks_for_tokens else torch.zeros_like(sums)
    reduced = torch.cat((mine, squared_norm, routing))
    dist.all_reduce(reduced)
    terms, [squares], of_routers = (part.tolist() for part in reduced.split([len(mine), 1, len(routing)]))
    norm = math.sqrt(squares) if squares >= 0.0 else math.nan
    return dict(zip(run.task.terms, terms, strict=True)), norm, of_routers


def _refuse(run: Run, loss: float, grad_norm: float) -> None:
    """Raises, on every rank, unless the run may skip this step."""
    scale = run.loss_scale
    if scale is not None and scale.scale > scale.smallest:
        return  # an overflow that a smaller scale may fix
    if run.config.train.nonfinite == "skip":
        return
    found = all_gather(_nonfinite_names(run.chunks))
    where = [f"{name} on rank {rank}" for rank, names in enumerate(found) for name in names[:2]]
    text = (
        f"step {run.state.step + 1}: loss {loss}, gradient norm {grad_norm}; not finite: "
        f"{', '.join(where[:6]) or 'only the loss'}. The weights are those of step {run.state.step}. Lower optim.lr, "
        "or set train.nonfinite=skip to skip such batches"
    )
    raise everywhere(NonFiniteError(text))


def _nonfinite_names(chunks: Sequence[nn.Module]) -> list[str]:
    names = []
    for name, parameter, _ in declared_parameters(*chunks):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            names.append(name)
    return names
