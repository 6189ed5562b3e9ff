"""cross_entropy: torch's loss and gradient, in one process or split over tp, and refusals."""

import math
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.errors import ShapeError
from megalith.fusions import use
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.tensor import cross_entropy as cross_entropy_of_ranks
from megalith.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tests.rank_pool import ranks

S, B = 5, 3
V = 31  # a prime: over 4 ranks 8, 8, 8 and 7
EXACT, SINGLE = 1e-12, 1e-5  # a few roundings in float64; in float32, sums of 31 terms


def example(dtype: torch.dtype = torch.float64, size: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [S, B, V], targets on every rank, and the gradient of the losses [S, B]."""
    generator = torch.Generator().manual_seed(5)
    logits = (size * torch.randn(S, B, V, generator=generator, dtype=torch.float64)).to(dtype)
    target = (torch.arange(S * B) * 7 % V).view(S, B)
    return logits, target, torch.randn(S, B, generator=generator, dtype=torch.float64)


def by_torch(logits: Tensor, target: Tensor, dloss: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The losses and the gradient of the logits in float64, from the same rounded logits."""
    z = logits.double().requires_grad_()
    losses = cross_entropy(z.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing).view(S, B)
    return losses.detach(), torch.autograd.grad(losses, z, dloss)[0]


def on_this_rank(dtype: torch.dtype, smoothing: float) -> tuple[Tensor, Tensor]:
    """The losses and the gradient of this rank's part of the logits."""
    logits, target, dloss = example(dtype)
    group = dist.group.WORLD if dist.is_initialized() else None
    size, rank = (group.size(), group.rank()) if group else (1, 0)
    part = logits[..., slice(*chunk_range(V, size, rank))].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(part, target, V, group, smoothing)
    return losses.detach(), torch.autograd.grad(losses, part, dloss.to(losses.dtype))[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_loss_and_gradient_are_those_of_torch_and_the_loss_is_equal_on_all_ranks(
    num_ranks, dtype, tolerance, smoothing
):
    answers = [on_this_rank(dtype, smoothing)] if num_ranks == 1 else ranks(num_ranks, on_this_rank, dtype, smoothing)
    losses, dlogits = by_torch(*example(dtype), smoothing)
    for loss, _ in answers:
        assert loss.dtype == dtype
        assert torch.equal(loss, answers[0][0])
    torch.testing.assert_close(answers[0][0].double(), losses, rtol=tolerance, atol=tolerance)
    got = torch.cat([gradient for _, gradient in answers], dim=-1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), dlogits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_give_float32_losses_and_gradients_rounded_once(num_ranks, dtype):
    answers = [on_this_rank(dtype, 0.1)] if num_ranks == 1 else ranks(num_ranks, on_this_rank, dtype, 0.1)
    losses, dlogits = by_torch(*example(dtype), 0.1)
    assert answers[0][0].dtype == torch.float32
    torch.testing.assert_close(answers[0][0].double(), losses, rtol=SINGLE, atol=SINGLE)
    got = torch.cat([gradient for _, gradient in answers], dim=-1)
    assert got.dtype == dtype
    half_an_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), dlogits, rtol=1.01 * half_an_ulp, atol=1e-7)


def smoothed_by_hand() -> float:
    """One token, V = 8, alpha = 0.1; the logit of the target is 1 and the others are 0."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    logits[0, 0, 5] = 1.0
    part = logits.chunk(size, dim=-1)[rank]
    group = dist.group.WORLD if size > 1 else None
    return vocab_parallel_cross_entropy(part, torch.tensor([[5]]), 8, group, 0.1).item()


def test_smoothing_is_over_the_whole_vocabulary():
    # log(7 + e) - 0.9 * 1 - 0.1 / 8 * 1; a mean over a rank's own part would differ between ranks
    want = math.log(7.0 + math.e) - 0.9 - 0.1 / 8
    for got in (smoothed_by_hand(), *ranks(2, smoothed_by_hand), *ranks(4, smoothed_by_hand)):
        assert got == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_the_derivative(smoothing):
    logits, target, _ = example()
    logits = logits[:2, :2, :7].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: vocab_parallel_cross_entropy(z, target[:2, :2] % 7, 7, None, smoothing), logits
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_do_not_overflow(dtype):
    top = torch.finfo(dtype).max / 4
    logits = torch.tensor([[[top, 0.0, -top]], [[top, top, 0.0]]], dtype=dtype, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([[0], [1]]), 3, None)
    assert losses.flatten().tolist() == pytest.approx([0.0, math.log(2.0)], rel=1e-6)  # not lost next to 1e38
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_nan_passes():
    logits, target, _ = example(torch.float32)
    logits[1, 2, 30] = float("nan")
    losses = vocab_parallel_cross_entropy(logits, target, V, None)
    assert losses.isnan().nonzero().tolist() == [[1, 2]]


def loss_of_labels_outside_the_vocabulary() -> list[float]:
    logits, target, _ = example(torch.float32)
    target[0, 0], target[1, 1] = -100, V
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = vocab_parallel_cross_entropy(
        logits[..., slice(*chunk_range(V, size, rank))], target, V, dist.group.WORLD, 0.0
    )
    return losses.isnan().nonzero().tolist()


def test_a_label_outside_the_vocabulary_is_not_taken_for_a_loss():
    assert ranks(2, loss_of_labels_outside_the_vocabulary) == [[[0, 0], [1, 1]]] * 2


def test_inputs_are_not_written_to_and_strides_do_not_matter():
    logits, target, dloss = example()
    strided = logits.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    losses = vocab_parallel_cross_entropy(strided, target.t().contiguous().t(), V, None)
    (dlogits,) = torch.autograd.grad(losses, strided, dloss, retain_graph=True)
    (again,) = torch.autograd.grad(losses, strided, dloss.t().contiguous().t())
    want, dwant = by_torch(logits, target, dloss, 0.0)
    torch.testing.assert_close(losses.detach(), want, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(dlogits, dwant, rtol=EXACT, atol=EXACT)
    assert torch.equal(again, dlogits)
    assert torch.equal(strided, logits)


@pytest.mark.parametrize("shape", [(S, B, V - 1), (S, B + 1, V), (B, S, V), (S, V), (S, B, 1)])
def test_logits_of_another_shape_are_refused(shape):
    _, target, _ = example()
    with pytest.raises(
        ShapeError, match=r"must have shape \[5, 3, 31\] for targets \[5, 3\] \(rank 0 of 1, vocabulary of 31\); got"
    ):
        vocab_parallel_cross_entropy(torch.zeros(shape), target, V, None)


def refuse_the_whole_vocabulary() -> None:
    logits, target, _ = example()
    with pytest.raises(
        ShapeError, match=r"must have shape \[5, 3, 1[56]\] .*rank [01] of 2, vocabulary of 31.*got \[5, 3, 31\]"
    ):
        vocab_parallel_cross_entropy(logits, target, V, dist.group.WORLD)


def test_whole_logits_where_a_part_is_wanted_are_refused_on_every_rank():
    ranks(2, refuse_the_whole_vocabulary)


# sizes for a head: rows divide over 4 ranks, and no number of tokens is divisible by the chunk size
ROWS, H, CHUNK = 8, 6, 5


def head_example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [S, B, H], weight [V, H], targets and the gradient of the losses, in float64."""
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(*size, H, generator=generator, dtype=torch.float64) for size in ((ROWS, B), (V,)))
    target = (torch.arange(ROWS * B) * 7 % V).view(ROWS, B)
    return x, weight, target, torch.randn(ROWS, B, generator=generator, dtype=torch.float64)


def by_chunks(chunk_size: int) -> AbstractContextManager[Any]:
    """A loss that takes ``chunk_size`` tokens at a time, in float64 too."""
    stack = ExitStack()
    stack.enter_context(use("blocked"))
    fused = partial(fused_linear_cross_entropy, chunk_size=chunk_size)
    stack.enter_context(patch.object(cross_entropy_of_ranks, "fused_linear_cross_entropy", fused))
    return stack


def of_head(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of x, or this rank's part of it, and of this rank's rows of the weight."""
    x, weight, target, dloss = head_example()
    group = dist.group.WORLD if dist.is_initialized() else None
    size, rank = (group.size(), group.rank()) if group else (1, 0)
    x = (x.chunk(size)[rank] if sequence_parallel else x).clone().requires_grad_()
    weight = weight[slice(*chunk_range(V, size, rank))].clone().requires_grad_()
    with by_chunks(CHUNK):
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, V, group, sequence_parallel=sequence_parallel)
        return losses.detach(), *torch.autograd.grad(losses, (x, weight), dloss)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_with_its_projection_it_is_that_of_logits_that_are_made(num_ranks, sequence_parallel):
    answers = [of_head(sequence_parallel)] if num_ranks == 1 else ranks(num_ranks, of_head, sequence_parallel)
    x, weight, target, dloss = head_example()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = (x @ weight.t()).flatten(0, 1)
    want = cross_entropy(logits, target.flatten(), reduction="none").view(ROWS, B)
    dx, dweight = torch.autograd.grad(want, (x, weight), dloss)
    for losses, *_ in answers:
        assert torch.equal(losses, answers[0][0])
    torch.testing.assert_close(answers[0][0], want.detach(), rtol=EXACT, atol=EXACT)
    parts = [part for _, part, _ in answers]
    if sequence_parallel:
        parts = [torch.cat(parts)]
    for part in parts:
        torch.testing.assert_close(part, dx, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(torch.cat([rows for *_, rows in answers]), dweight, rtol=EXACT, atol=EXACT)


def largest_allocation() -> int:
    """Elements of the largest tensor allocated on this rank in forward and backward, for 256 tokens and V = 1009."""
    group = dist.group.WORLD
    first, end = chunk_range(1009, group.size(), group.rank())
    x, weight = torch.randn(256, 1, 4, requires_grad=True), torch.randn(end - first, 4, requires_grad=True)
    target = torch.arange(256).view(256, 1)

    def step() -> None:
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, 1009, group)
        losses.sum().backward()

    with by_chunks(64):
        step()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            step()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]") // 4


def test_with_its_projection_no_rank_allocates_more_than_a_chunk_of_logits():
    for rank, elements in enumerate(ranks(2, largest_allocation)):
        first, end = chunk_range(1009, 2, rank)
        assert elements <= 64 * (end - first)


def test_a_weight_that_is_not_this_ranks_part_is_refused():
    x, weight, target, _ = head_example()
    with pytest.raises(ShapeError, match=r"weight must have 31 rows \(rank 0 of 1, vocabulary of 31\); got \[30, 6\]"):
        vocab_parallel_linear_cross_entropy(x, weight[:-1], target, V, None)
