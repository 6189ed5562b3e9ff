"""The loss of a step whose samples are compared with each other (``JointTask``), and its gradient by micro-batch.

    1. forward of every micro-batch, without gradients       -> outputs
    2. loss over the outputs of all ranks, and its backward   -> d loss / d output, one tensor per micro-batch
    3. forward and backward of every micro-batch               of sum(output * d loss / d output)

The third is that of ``training.step``; its gradient in the weights is exactly that of the loss. Gao et al. 2021,
"GradCache", arXiv:2101.06983.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.training.batch import inputs_for
from megalith.training.run import Run
from megalith.training.tasks.task import JointTask

__all__ = ["JointLoss", "joint_loss"]


@dataclass(frozen=True)
class JointLoss:
    """The loss of a step on this rank; both are empty on a rank without the last stage.

    Attributes:
        sums: the sum of each term over this rank's samples, scalars.
        gradients: of the sums times their coefficients, with respect to the output of each micro-batch.
    """

    sums: Mapping[str, Tensor]
    gradients: Sequence[Tensor]

    def seed(self, output: Tensor, micro_batch: int) -> Tensor:
        """Returns a scalar whose gradient in ``output``, that of the micro-batch, is the loss's."""
        return (output * self.gradients[micro_batch]).sum()


def joint_loss(run: Run, micro_batches: Sequence[Any], coefficients: Mapping[str, float]) -> JointLoss | None:
    """Computes the loss over all micro-batches in a pass without gradients. Collective.

    Returns None if the step does not need that pass: its samples are not compared, or each rank has one micro-batch.
    """
    task = run.task
    if not isinstance(task, JointTask) or len(micro_batches) == 1:
        return None
    outputs, compared = list[Tensor](), list[Any]()  # a rank runs the micro-batches in order
    inputs_of = inputs_for(task, micro_batches, run.state.step, run.device, run.chunks[-1])

    def forward(model: nn.Module, micro_batch: int, hidden: Tensor | None) -> Tensor:
        given = inputs_of(model, micro_batch)
        output: Tensor = task.forward(model, given, hidden)
        if run.pipeline.holds_output(model):
            outputs.append(output)
            compared.append(task.compared(given))
        return output

    with torch.no_grad(), run.pipeline.holding_weights():
        run.pipeline.evaluate(
            len(micro_batches), forward, lambda index: task.hidden_shape(micro_batches[index], run.options)
        )
    if not outputs:
        return JointLoss({}, ())
    leaves = [output.requires_grad_() for output in outputs]
    sums = task.joint_sums(leaves, compared, run.pg_collection)
    loss = torch.stack([sums[name] * coefficient for name, coefficient in coefficients.items()]).sum()
    return JointLoss({name: value.detach() for name, value in sums.items()}, torch.autograd.grad(loss, leaves))
