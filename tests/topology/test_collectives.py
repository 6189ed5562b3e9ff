"""collectives: each against plain torch on the tensors of all ranks, forward and backward, on 2 and 4 ranks.

Entries are small integers, whose sums are exact in every dtype, so results must be equal.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import ShapeError
from megalith.topology import collectives as c
from tests.rank_pool import ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
}


@dataclass(frozen=True)
class Row:
    """One collective and its meaning: ``joint`` maps the inputs of all ranks to the outputs of all ranks."""

    region: Callable[..., Tensor]
    joint: Callable[[list[Tensor]], list[Tensor]]
    same_input: bool = False  # one tensor held by all ranks: its gradient is the sum over its uses
    same_output: bool = False  # one tensor held by all ranks: its gradient counts once


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(dim=0)


ROWS = {
    "copy": Row(c.copy_to_tensor_model_parallel_region, lambda xs: xs, same_input=True),
    "reduce": Row(c.reduce_from_tensor_model_parallel_region, lambda xs: [total(xs)] * len(xs), same_output=True),
    "scatter": Row(
        c.scatter_to_tensor_model_parallel_region, lambda xs: list(xs[0].chunk(len(xs), -1)), same_input=True
    ),
    "gather": Row(
        c.gather_from_tensor_model_parallel_region, lambda xs: [torch.cat(xs, -1)] * len(xs), same_output=True
    ),
    "scatter sequence": Row(
        c.scatter_to_sequence_parallel_region, lambda xs: list(xs[0].chunk(len(xs))), same_input=True
    ),
    "gather sequence": Row(c.gather_from_sequence_parallel_region, lambda xs: [torch.cat(xs)] * len(xs)),
    "gather sequence for a consumer that is the same": Row(
        lambda x, group: c.gather_from_sequence_parallel_region(x, group, tensor_parallel_output_grad=False),
        lambda xs: [torch.cat(xs)] * len(xs),
        same_output=True,
    ),
    "reduce-scatter sequence": Row(
        c.reduce_scatter_to_sequence_parallel_region, lambda xs: list(total(xs).chunk(len(xs)))
    ),
    "all-gather last": Row(c.all_gather_last_dim_from_tensor_parallel_region, lambda xs: [torch.cat(xs, -1)] * len(xs)),
    "reduce-scatter last": Row(
        c.reduce_scatter_last_dim_to_tensor_parallel_region, lambda xs: list(total(xs).chunk(len(xs), -1))
    ),
    "all-to-all": Row(
        c.all_to_all, lambda xs: [torch.cat([x.chunk(len(xs))[to] for x in xs]) for to in range(len(xs))]
    ),
}


def integers(shape: torch.Size | tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_jointly(row: Row, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, gradients of the outputs, and gradients of the inputs of all ranks, by autograd in one process."""
    leaves = [x.clone().requires_grad_() for x in (xs[:1] if row.same_input else xs)]
    ys = row.joint(leaves * len(xs) if row.same_input else leaves)
    dys = [integers(y.shape, 100 if row.same_output else 100 + rank, y.dtype) for rank, y in enumerate(ys)]
    uses = list(zip(ys, dys, strict=True))[: 1 if row.same_output else None]
    grads = torch.autograd.grad([y for y, _ in uses], leaves, [dy for _, dy in uses])
    return ys, dys, list(grads) * (len(xs) if row.same_input else 1)


def check_against_one_process(name: str) -> None:
    row, W, rank = ROWS[name], dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        xs = [integers((8, 3, 12), 0 if row.same_input else other, dtype) for other in range(W)]
        ys, dys, dxs = run_jointly(row, xs)
        for layout in LAYOUTS.values():
            x, dy = layout(xs[rank]).requires_grad_(), layout(dys[rank])
            y = row.region(x, dist.group.WORLD)
            (dx,) = torch.autograd.grad(y, x, dy)
            assert y.dtype == dx.dtype == dtype
            assert y.is_contiguous()
            assert dx.is_contiguous()
            assert torch.equal(y, ys[rank])
            assert torch.equal(dx, dxs[rank])
            assert torch.equal(x, xs[rank]), "the input was written to"
            assert torch.equal(dy, dys[rank]), "the gradient was written to"


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_each_equals_one_process_forward_and_backward(name, num_ranks):
    ranks(num_ranks, check_against_one_process, name)


def gradient_of_a_sum(name: str) -> list[float]:
    x = torch.ones(4, 1, 4, requires_grad=True)
    ROWS[name].region(x, dist.group.WORLD).sum().backward()  # dy has strides 0
    return x.grad.unique().tolist()


def test_gradients_without_strides_count_in_full():
    assert ranks(2, gradient_of_a_sum, "copy") == [[2.0]] * 2
    assert ranks(2, gradient_of_a_sum, "reduce") == [[1.0]] * 2
    assert ranks(2, gradient_of_a_sum, "all-gather last") == [[2.0]] * 2


def route_unevenly() -> list[float]:
    """What this rank receives when rank r sends (2 r + to) % 3 rows of 10 r + to to each; gradients go back."""
    W, rank = dist.get_world_size(), dist.get_rank()
    sent = [(2 * rank + to) % 3 for to in range(W)]
    received = [(2 * source + rank) % 3 for source in range(W)]
    values = torch.tensor([10.0 * rank + to for to in range(W)])
    x = values.repeat_interleave(torch.tensor(sent))[:, None].expand(-1, 2).requires_grad_()
    y = c.all_to_all(x, dist.group.WORLD, received, sent)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(dx, x)
    return y[:, 0].tolist()


def test_rows_are_routed_unevenly_and_their_gradients_back():
    assert ranks(4, route_unevenly) == [
        [10, 10, 20],  # 0 sends (0 1 2 0), 1 sends (2 0 1 2), 2 sends (1 2 0 1), 3 sends (0 1 2 0)
        [1, 21, 21, 31],
        [2, 2, 12, 32, 32],
        [13, 13, 23],
    ]


def refused(region: Callable[..., Tensor], shape: tuple[int, ...], *args: object) -> str:
    """The refusal on this rank, after checking that the group still works."""
    with pytest.raises(ShapeError) as refusal:
        region(torch.ones(shape), dist.group.WORLD, *args)
    together = torch.ones(())
    dist.all_reduce(together)
    assert together.item() == dist.get_world_size()
    return str(refusal.value)


@pytest.mark.parametrize(
    ("region", "shape", "args", "message"),
    [
        (c.scatter_to_tensor_model_parallel_region, (4, 7), (), "dimension -1 of [4, 7] must be divisible by the 2"),
        (c.reduce_scatter_last_dim_to_tensor_parallel_region, (4, 7), (), "pad it to 8"),
        (c.scatter_to_sequence_parallel_region, (3, 4), (), "dimension 0 of [3, 4] must be divisible by the 2 ranks"),
        (c.reduce_scatter_to_sequence_parallel_region, (3, 4), (), "dimension 0 of [3, 4]"),
        (c.gather_from_sequence_parallel_region, (), (), "got a scalar"),
        (c.reduce_scatter_to_sequence_parallel_region, (), (), "got a scalar"),
        (c.all_to_all, (3, 4), (), "dimension 0 of [3, 4] must be divisible"),
        (c.all_to_all, (4, 4), ([2, 2], [1, 2]), "must sum to 4 rows; got input_split_sizes=[1, 2]"),
        (c.all_to_all, (4, 4), ([2, 1, 1], [2, 2]), "must be 2 non-negative counts each"),
        (c.all_to_all, (4, 4), ([5, -1], [2, 2]), "output_split_sizes=[5, -1]"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_sent(region, shape, args, message):
    for refusal in ranks(2, refused, region, shape, *args):
        assert message in refusal


def identities() -> None:
    x = torch.ones(3, 5).t()
    for group in (None, dist.group.WORLD):
        for row in ROWS.values():
            assert row.region(x, group) is x


def test_alone_each_is_the_identity():
    ranks(1, identities)
