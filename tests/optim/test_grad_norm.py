"""grad_norm: numbers by hand, torch's norm in one process, and the same norm and gradients in every layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from megalith.errors import ShapeError
from megalith.optim.grad_norm import clip_coefficient, local_squared_norm, scale_gradients_
from tests.checkpoint.layouts import Layout, mesh_of
from tests.rank_pool import ranks

EXACT = 1e-12
# of a float32 norm: one rounding if those of the additions cancel, and at most 512 of them, in eight sums per row of
# 4,096, if all are in one direction
ROUNDINGS = {"normal": 2.0**-24, "constant": 512 * 2.0**-24 / 2}
R = Replicate()
# shape, dimension that FSDP shards, dimension that tp shards
GRADIENTS: dict[str, tuple[tuple[int, ...], int | None, int | None]] = {
    "both": ((8, 12), 1, 0),
    "fsdp alone": ((6, 4), 0, None),
    "tp alone": ((3, 8), None, 1),
    "replicated": ((5,), None, None),
    "uneven": ((7, 3), 0, None),
    "an empty part": ((9,), None, 0),  # 3, 3, 3 and none over 4 ranks
    "one element": ((1,), 0, None),
    "twice along one dimension": ((13, 2), 0, 0),
}
LAYOUTS: list[Layout] = [(2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 2, 1)]


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _, _) in GRADIENTS.items()
    }


def in_layout(layout: Layout) -> list[nn.Parameter]:
    """Parameters whose gradients are DTensors on the mesh of ``layout``."""
    parameters = []
    for name, full in gradients().items():
        _, shard_dim, tp_dim = GRADIENTS[name]
        placements: list[Placement] = [R, *(R if dim is None else Shard(dim) for dim in (shard_dim, tp_dim))]
        parameters.append(with_gradient(distribute_tensor(full, mesh_of(layout), placements, src_data_rank=None)))
    return parameters


def global_norm(layout: Layout) -> float:
    squared = local_squared_norm(in_layout(layout))
    assert squared.dtype == torch.float64
    dist.all_reduce(squared)
    return squared.sqrt().item()


@pytest.mark.parametrize("shape", [(9_000, 2_048), (40_000_003,), (1,)], ids=str)
@pytest.mark.parametrize("values", ROUNDINGS)
def test_the_norm_of_a_large_float32_gradient_is_exact_to_its_roundings(shape, values):
    generator = torch.Generator().manual_seed(1)
    gradient = torch.full(shape, 1e-3) if values == "constant" else torch.randn(shape, generator=generator)
    exact = math.sqrt(math.fsum(part.double().square().sum().item() for part in gradient.view(-1).split(1 << 22)))
    whole = local_squared_norm([with_gradient(gradient)]).sqrt().item()
    assert whole == pytest.approx(exact, rel=ROUNDINGS[values])
    halves = gradient.tensor_split(2)  # as two ranks hold it
    squared = sum(local_squared_norm([with_gradient(half)]).item() for half in halves if half.numel())
    assert math.sqrt(squared) == pytest.approx(exact, rel=ROUNDINGS[values])


def test_a_gradient_of_3_and_4_has_norm_5_and_is_clipped_to_a_fifth():
    parameters = [with_gradient(torch.tensor([3.0])), with_gradient(torch.tensor([[4.0]]))]
    norm = local_squared_norm(parameters).sqrt().item()
    assert norm == 5.0
    coefficient = clip_coefficient(norm, 1.0)
    assert coefficient == pytest.approx(0.2, abs=1e-6)
    assert coefficient == 1.0 / (5.0 + 1e-6)
    scale_gradients_(parameters, coefficient)
    assert [p.grad.item() for p in parameters] == pytest.approx([0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize(("norm", "clip_norm", "want"), [(5.0, 0.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0)])
def test_small_gradients_and_a_clip_norm_of_0_leave_everything(norm, clip_norm, want):
    assert clip_coefficient(norm, clip_norm) == want


def test_on_one_process_it_is_torchs_norm_and_clipping():
    ours, theirs = ([with_gradient(g.clone()) for g in gradients().values()] for _ in range(2))
    want = torch.nn.utils.get_total_norm([p.grad for p in theirs]).item()
    norm = local_squared_norm(ours).sqrt().item()
    assert norm == pytest.approx(want, rel=EXACT)
    torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    scale_gradients_(ours, clip_coefficient(norm, 0.7))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=EXACT, atol=0.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_norm_is_that_of_one_process_in_every_layout(layout):
    want = torch.cat([g.flatten() for g in gradients().values()]).norm().item()
    got = ranks(4, global_norm, layout)
    assert len(set(got)) == 1, "ranks must clip alike"
    assert got[0] == pytest.approx(want, rel=EXACT)


def scaled(layout: Layout) -> bool:
    parameters = in_layout(layout)
    scale_gradients_(parameters, 0.25)
    return all(
        torch.equal(parameter.grad.full_tensor(), 0.25 * full)
        for parameter, full in zip(parameters, gradients().values(), strict=True)
    )


def test_gradients_are_scaled_in_place_on_every_rank():
    assert ranks(4, scaled, (1, 2, 2)) == [True] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_pass(bad):
    parameters = [with_gradient(torch.tensor([1.0, bad])), with_gradient(torch.tensor([2.0]))]
    norm = local_squared_norm(parameters).sqrt().item()
    assert str(norm) == str(bad)
    coefficient = clip_coefficient(norm, 1.0)
    assert str(coefficient) == ("nan" if math.isnan(bad) else "0.0")
    scale_gradients_(parameters, coefficient)
    assert parameters[0].grad[1].isnan(), "nothing turns a gradient that is not finite into one that is"


def test_without_gradients_the_norm_is_0():
    squared = local_squared_norm([nn.Parameter(torch.ones(3)), with_gradient(torch.empty(0, 4))])
    assert squared.item() == 0.0
    assert squared.dtype == torch.float64
    scale_gradients_([nn.Parameter(torch.ones(3))], 0.5)


def test_squares_of_many_float32_gradients_add_up_in_float64():
    small, large = torch.full((1000,), 1e-4), torch.tensor([1e4])
    squared = local_squared_norm([with_gradient(large), *(with_gradient(small) for _ in range(10))])
    assert squared.item() == pytest.approx(1e8 + 1e-4, rel=1e-14, abs=1e-6)
    assert squared.item() != pytest.approx(1e8, rel=1e-13)


def refuse_a_term_of_a_sum() -> None:
    parameter = with_gradient(DTensor.from_local(torch.ones(2), mesh_of((1, 1, 2))["tp"], [Partial()]))
    with pytest.raises(ShapeError, match="must be reduced first"):
        local_squared_norm([parameter])


def test_a_gradient_that_is_not_summed_yet_is_refused():
    ranks(2, refuse_a_term_of_a_sum)
