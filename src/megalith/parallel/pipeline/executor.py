"""Runs a schedule: the one place where a step's forwards and backwards happen, in training and in evaluation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.parallel.pipeline.links import Links, Messages, ShapeOf
from megalith.parallel.pipeline.plan import Schedule
from megalith.parallel.sharding.fsdp import gradient_sync

__all__ = ["Forward", "execute"]

# (the chunk's module, the number of the micro-batch, what the stage before gave or None in the first) -> in the last
# stage a scalar if a backward follows, in the others their hidden states
Forward = Callable[[nn.Module, int, Tensor | None], Tensor]


def execute(schedule: Schedule, links: Links, chunks: Sequence[nn.Module], forward: Forward, shape_of: ShapeOf) -> None:
    """Does every action that ``schedule`` has for this rank, with its ``chunks``.

    Of a forward that has a backward the graph is kept until then, without the output, which travels to the next stage.
    Gradients accumulate in the chunks' parameters; they are reduced over data-parallel ranks in the backward that the
    plan marks.
    """
    plan = schedule.plans[links.rank]
    messages = Messages(links, schedule, shape_of)
    with_backward = {(action.chunk, action.micro_batch) for action in plan if action.kind == "backward"}
    kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | Tensor]] = {}
    for action in plan:
        chunk, k = action.chunk, action.micro_batch
        if action.kind == "forward":
            hidden = messages.input_of(k, chunk)
            if hidden is not None and (chunk, k) in with_backward:
                hidden.requires_grad_()
            output = forward(chunks[chunk], k, hidden)
            is_last = schedule.placement.next(links.rank, chunk) is None
            if not is_last:
                messages.send_output(k, chunk, output)
            if (chunk, k) in with_backward:
                kept[chunk, k] = hidden, output if is_last else get_gradient_edge(output)
            del hidden, output
        else:
            assert action.kind == "backward", "a split backward needs matrix products that put off their weights' part"
            gradient_sync(chunks[chunk], last=action.reduces, keeps_weights=schedule.placement.num_stages > 1)
            hidden, root = kept.pop((chunk, k))
            gradient = messages.gradient_of(k, chunk)
            if isinstance(root, Tensor):
                root.backward()
            else:
                torch.autograd.backward(root, gradient)
            if hidden is not None:
                assert hidden.grad is not None, "a stage's output depends on its input"
                messages.send_gradient(k, chunk, hidden.grad)
            del hidden, root, gradient  # what they hold is as large as activations
    messages.finish()
