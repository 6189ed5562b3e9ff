"""fused_indices_converter: rows by hand, skipped entries, round trips, refusals."""

import pytest
import torch

from megalith.errors import ConfigError, ShapeError
from megalith.fusions import IndicesToMultihot, fused_indices_to_multihot, fused_multihot_to_indices
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")


@pytest.mark.parametrize("path", PATHS)
def test_indices_worked_out_by_hand(path, device):
    indices = torch.tensor([[2, 0], [-1, 1], [3, -9]], device=device)
    weights = torch.tensor([[0.5, 0.25], [8.0, 1.0], [4.0, 2.0]], device=device, requires_grad=True)
    multihot, probs = fused_indices_to_multihot(indices, weights, 3, backend=path)
    assert multihot.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    assert probs.tolist() == [[0.25, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0] * 3]
    (gradient,) = torch.autograd.grad(probs, weights, torch.arange(9.0, device=device).view(3, 3))
    assert gradient.tolist() == [[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]]
    assert not multihot.requires_grad


@pytest.mark.parametrize("path", PATHS)
def test_an_expert_named_twice_gets_the_sum_and_each_slot_its_gradient(path, device):
    indices = torch.tensor([[1, 1, 0]], device=device, dtype=torch.int32)
    weights = torch.tensor([[1.0, 2.0, 4.0]], device=device, requires_grad=True)
    multihot, probs = fused_indices_to_multihot(indices, weights, 2, backend=path)
    assert multihot.tolist() == [[True, True]]
    assert probs.tolist() == [[4.0, 3.0]]
    (gradient,) = torch.autograd.grad(probs, weights, torch.tensor([[5.0, 7.0]], device=device))
    assert gradient.tolist() == [[7.0, 7.0, 5.0]]


@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_is_nan_stays_in_its_column_and_a_skipped_one_goes_nowhere(path, device):
    weights = torch.tensor([[float("nan"), float("inf")]], device=device)
    _, probs = fused_indices_to_multihot(torch.tensor([[1, -1]], device=device), weights, 3, backend=path)
    assert str(probs.tolist()) == "[[0.0, nan, 0.0]]"


@pytest.mark.parametrize("path", PATHS)
def test_a_map_becomes_indices_and_the_same_map_again(path, device):
    torch.manual_seed(0)
    multihot = torch.rand(9, 40, device=device) < 0.1
    probs = torch.rand(9, 40, device=device) * multihot
    most = int(multihot.sum(dim=1).max())
    indices, weights = fused_multihot_to_indices(multihot, probs, most, backend=path)
    again = fused_indices_to_multihot(indices, weights, 40, backend=path)
    assert torch.equal(again[0], multihot)
    assert torch.equal(again[1], probs)
    named = [row[row >= 0].tolist() for row in indices]
    assert named == [row.nonzero().flatten().tolist() for row in multihot]


@pytest.mark.parametrize("path", PATHS)
def test_more_experts_than_slots_leave_out_the_last(path, device):
    multihot = torch.tensor([[True, False, True, True], [False, False, False, True]], device=device)
    probs = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], device=device, requires_grad=True)
    indices, weights = fused_multihot_to_indices(multihot, probs, 2, backend=path)
    assert indices.tolist() == [[0, 2], [3, -1]]
    assert weights.tolist() == [[1.0, 3.0], [8.0, 0.0]]
    (gradient,) = torch.autograd.grad(weights, probs, torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device))
    assert gradient.tolist() == [[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 3.0]]


def test_class_is_the_same_operation():
    given = torch.tensor([[1, 0]]), torch.rand(1, 2), 4
    for got, want in zip(IndicesToMultihot.apply(*given), fused_indices_to_multihot(*given), strict=True):
        assert torch.equal(got, want)


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # gradients 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    dprobs = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0)
    weights = torch.ones(3, 2, dtype=torch.float16, requires_grad=True)
    _, probs = fused_indices_to_multihot(torch.tensor([[0, 3]] * 3), weights, 4, backend="triton")
    (gradient,) = torch.autograd.grad(probs, weights, dprobs)
    assert gradient.tolist() == [[2.0, 2.0]] * 3


INDICES, WEIGHTS = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("indices", "weights", "num_experts", "error", "message"),
    [
        (INDICES.float(), WEIGHTS, 4, ShapeError, r"indices must be int32 or int64; got torch.float32"),
        (INDICES, INDICES, 4, ShapeError, r"probs_indices must be float16, .*got torch.int64"),
        (
            INDICES,
            WEIGHTS[:, :2],
            4,
            ShapeError,
            r"probs_indices must be \[2, 3\], one for each entry of indices; got \[2, 2",
        ),
        (INDICES[0], WEIGHTS[0], 4, ShapeError, r"indices must be \[T, K\], .*got \[3\]"),
        (INDICES, WEIGHTS.to("meta"), 4, ShapeError, r"got indices on cpu, probs_indices on meta"),
        (INDICES, WEIGHTS, 0, ConfigError, r"num_of_local_experts must be an integer, 1 or more; got 0"),
        (INDICES, WEIGHTS, 2.0, ConfigError, r"num_of_local_experts must be an integer, 1 or more; got 2\.0"),
    ],
)
def test_indices_that_do_not_fit_are_refused(indices, weights, num_experts, error, message):
    with pytest.raises(error, match=message):
        fused_indices_to_multihot(indices, weights, num_experts)


@pytest.mark.parametrize(
    ("multihot", "probs", "topk", "error", "message"),
    [
        (INDICES, WEIGHTS, 1, ShapeError, r"multihot must be bool; got torch.int64"),
        (INDICES > 0, INDICES, 1, ShapeError, r"probs must be float16"),
        (
            INDICES > 0,
            WEIGHTS[:1],
            1,
            ShapeError,
            r"probs must be \[2, 3\], one for each entry of multihot; got \[1, 3",
        ),
        (INDICES[0] > 0, WEIGHTS[0], 1, ShapeError, r"multihot must be \[T, E\]"),
        (INDICES > 0, WEIGHTS, 4, ConfigError, r"topk must be from 1 to the number of experts, 3; got 4"),
        (INDICES > 0, WEIGHTS, 0, ConfigError, r"topk must be .*; got 0"),
    ],
)
def test_maps_that_do_not_fit_are_refused(multihot, probs, topk, error, message):
    with pytest.raises(error, match=message):
        fused_multihot_to_indices(multihot, probs, topk)
