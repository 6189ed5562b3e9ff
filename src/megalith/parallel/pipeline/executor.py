"""Runs a schedule: the only place where a step's forwards and backwards are run, in training and in evaluation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.parallel.pipeline.links import Links, Messages, ShapeOf
from megalith.parallel.pipeline.plan import Action, Schedule
from megalith.parallel.pipeline.split_product import SplitProduct, WeightPart
from megalith.parallel.sharding.fsdp import finish_backward, gradient_sync

__all__ = ["Forward", "execute"]

# (module of the chunk, index of the micro-batch, output of the previous stage or None in the first) -> hidden states;
# in the last stage a scalar if a backward follows
Forward = Callable[[nn.Module, int, Tensor | None], Tensor]


def execute(
    schedule: Schedule,
    links: Links,
    chunks: Sequence[nn.Module],
    forward: Forward,
    shape_of: ShapeOf,
    split_product: SplitProduct | None = None,
) -> None:
    """Runs every action that ``schedule`` has for this rank, on its ``chunks``.

    The graph of a forward is kept until its backward, but without the output, which is sent to the next stage.
    Gradients accumulate in the chunks' parameters, and are reduced over data-parallel ranks in the action that the plan
    marks. ``split_product`` is the matrix product of the chunks if the schedule splits backwards.
    """
    step = _Step(schedule, links, chunks, forward, shape_of, split_product)
    for action in schedule.plans[links.rank]:
        if action.kind == "forward":
            step.forward(action)
        elif action.kind == "backward_weight":
            step.backward_weight(action)
        else:
            step.backward(action)
    step.messages.finish()


class _Step:
    """One run of a schedule on this rank, with the state kept between the actions of a micro-batch in a chunk."""

    def __init__(
        self,
        schedule: Schedule,
        links: Links,
        chunks: Sequence[nn.Module],
        run_forward: Forward,
        shape_of: ShapeOf,
        split_product: SplitProduct | None,
    ) -> None:
        self.messages = Messages(links, schedule, shape_of)
        self._chunks = chunks
        self._run_forward = run_forward
        self._split_product = split_product
        self._keeps_weights = schedule.placement.num_stages > 1
        self._last_chunks = {c for c in range(len(chunks)) if schedule.placement.next(links.rank, c) is None}
        self._with_backward = {
            (action.chunk, action.micro_batch)
            for action in schedule.plans[links.rank]
            if action.kind in ("backward", "backward_input")
        }
        self._kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | Tensor]] = {}
        self._weight_parts: dict[tuple[int, int], list[WeightPart]] = {}

    def forward(self, action: Action) -> None:
        """Runs the chunk, sends its output to the next stage, and keeps the graph if a backward follows."""
        chunk, k = action.chunk, action.micro_batch
        hidden = self.messages.input_of(k, chunk)
        if hidden is not None and (chunk, k) in self._with_backward:
            hidden.requires_grad_()
        output = self._run_forward(self._chunks[chunk], k, hidden)
        is_last = chunk in self._last_chunks
        if not is_last:
            self.messages.send_output(k, chunk, output)
        if (chunk, k) in self._with_backward:
            self._kept[chunk, k] = hidden, output if is_last else get_gradient_edge(output)

    def backward(self, action: Action) -> None:
        """Runs the backward of the chunk, and sends the gradient of its input to the previous stage."""
        chunk, k = action.chunk, action.micro_batch
        gradient_sync(self._chunks[chunk], last=action.reduces, keeps_weights=self._keeps_weights)
        hidden, root = self._kept.pop((chunk, k))
        gradient = self.messages.gradient_of(k, chunk)
        if isinstance(root, Tensor):
            root.backward()
        else:
            torch.autograd.backward(root, gradient)
        if action.kind == "backward_input":
            assert self._split_product is not None, "Pipeline has checked that split_product is set"
            self._weight_parts[chunk, k] = self._split_product.take()
        if hidden is not None:
            assert hidden.grad is not None, "a stage's output depends on its input"
            self.messages.send_gradient(k, chunk, hidden.grad)

    def backward_weight(self, action: Action) -> None:
        """Computes the weight gradients that the backward_input has deferred."""
        chunk = self._chunks[action.chunk]
        gradient_sync(chunk, last=False, keeps_weights=self._keeps_weights)
        parts = self._weight_parts.pop((action.chunk, action.micro_batch))
        while parts:  # each is as large as an activation, and is freed before the next one is computed
            parts.pop().backward()
        finish_backward(chunk)  # accumulates in the reduction dtype, as backward_input has done for biases and norms
        if action.reduces:
            gradient_sync(chunk, last=True, keeps_weights=self._keeps_weights)
            finish_backward(chunk)
