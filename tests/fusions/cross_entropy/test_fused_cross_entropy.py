"""fused_cross_entropy: its own properties, in addition to those that test_every_fusion.py checks for all operations."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith import fusions
from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions.core.compiler import why_not_compile
from megalith.fusions.core.row_wise import RUNNERS
from megalith.fusions.cross_entropy.blocked import gradient_into, statistics
from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from tests.compiling import builds
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")
# float32 compared with float64: the loss and the target's gradient, however small
SINGLE = 4e-6
every_path = pytest.mark.parametrize("path", PATHS)
# numpy warns of it in the interpreter; a GPU does not
infinite = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def loss_and_gradient(logits: Tensor, target: Tensor, path: str | None, **options: Any) -> tuple[Tensor, Tensor]:
    x = logits.detach().requires_grad_()
    loss = fused_vocab_parallel_cross_entropy(x, target, backend=path, **options)
    return loss.detach(), torch.autograd.grad(loss, x, torch.ones_like(loss))[0]


@every_path
@pytest.mark.parametrize("gap", [1.0, 6.0, 10.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tiny_loss_and_its_gradient_keep_their_digits(gap, dtype, path, device):
    # torch's float32 result for a loss of 1e-13 is 0
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    logits[torch.arange(4), torch.arange(4) * 1250] += gap
    logits, target = (logits * 4.0).to(dtype), torch.arange(4, device=device) * 1250
    exact = logits.double()
    others = torch.logsumexp(exact.scatter(1, target[:, None], -math.inf), 1) - exact.gather(1, target[:, None])[:, 0]
    loss, dlogits = loss_and_gradient(logits, target, path)
    torch.testing.assert_close(loss.double(), torch.log1p(torch.exp(others)), rtol=SINGLE, atol=1e-37)
    if dtype == torch.float32:
        at_target = dlogits.gather(1, target[:, None])[:, 0].double()
        torch.testing.assert_close(at_target, -torch.sigmoid(others), rtol=SINGLE, atol=1e-37)


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_large_logits_neither_overflow_nor_lose_a_loss_of_ordinary_size(dtype, path, device):
    top = 60000.0 if dtype == torch.float16 else 1e38
    logits = torch.tensor([[top, top, -top], [top, 0.0, -top]], dtype=dtype, device=device)
    loss, dlogits = loss_and_gradient(logits, torch.tensor([1, 0], device=device), path)
    assert loss.tolist() == pytest.approx([math.log(2.0), 0.0], rel=1e-6)
    assert dlogits.tolist() == [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("path", [*PATHS, pytest.param("compile", marks=pytest.mark.slow)])
def test_label_smoothing_of_the_largest_logits_does_not_overflow(path, device):
    logits = torch.full((3, 8), 3e38, device=device)
    logits[1] *= -1.0
    logits[2] = 1.0
    loss, dlogits = loss_and_gradient(
        logits, torch.zeros(3, dtype=torch.int64, device=device), path, label_smoothing=0.5
    )
    assert loss.tolist() == pytest.approx([math.log(8.0)] * 3, abs=2.0**-22 * 3e38)  # the rounding of such logits
    assert loss[2].item() == pytest.approx(math.log(8.0))
    assert dlogits[0].tolist() == pytest.approx([-0.4375, *[0.0625] * 7])
    assert torch.equal(dlogits[0], dlogits[2])


@every_path
def test_each_row_of_the_gradient_sums_to_zero(path, device):
    logits = 3.0 * torch.randn(3, 3001, generator=torch.Generator().manual_seed(2))
    _, dlogits = loss_and_gradient(logits.to(device), torch.tensor([0, 7, 3000], device=device), path)
    assert dlogits.double().sum(dim=1).abs().max() <= 1e-6


def test_nemo_smoothing_spreads_over_the_words_other_than_the_target():
    logits, target = torch.randn(5, 11, dtype=torch.float64), torch.tensor([0, 3, 10, 7, 1])
    log_p = torch.log_softmax(logits, dim=1)
    of_target = log_p.gather(1, target[:, None])[:, 0]
    want = -0.9 * of_target - 0.1 / 10 * (log_p.sum(dim=1) - of_target)
    got = fused_vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1, smoothing="nemo")
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0.0)


@every_path
@infinite
def test_ignored_rows_have_no_loss_and_no_gradient_whatever_their_logits(path, device):
    logits = torch.randn(4, 9, device=device)
    logits[1], logits[2, 3] = math.nan, math.inf
    target = torch.tensor([3, -100, -100, 8], device=device)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0}
    loss, dlogits = loss_and_gradient(logits, target, path, **options)
    assert loss[1:3].tolist() == [0.0, 0.0]
    assert not dlogits[1:3].any()
    kept, dkept = loss_and_gradient(logits[::3], target[::3], path, **options)
    torch.testing.assert_close(loss[::3], kept)
    torch.testing.assert_close(dlogits[::3], dkept)


@every_path
@infinite
def test_a_target_outside_of_the_vocabulary_is_not_taken_for_a_loss(path, device):
    logits, target = torch.randn(4, 8, device=device), torch.tensor([-1, 6, 7, -100], device=device)
    loss, dlogits = loss_and_gradient(logits, target, path, vocab_size=7, ignore_index=None)
    assert loss.isnan().tolist() == [True, False, True, True]
    assert dlogits[:, :7].isnan().any(dim=1).tolist() == [True, False, True, True]
    loss, _ = loss_and_gradient(logits, target, path, ignore_index=6)
    assert loss.isnan().tolist() == [True, False, False, True]
    assert loss[1] == 0.0


@every_path
@infinite
def test_nan_and_inf_pass_as_in_torch(path, device):
    inf, nan = math.inf, math.nan
    logits = [[nan, 0.0, 1.0], [inf, 0.0, 1.0], [0.0, inf, 1.0], [-inf, 0.0, 1.0], [0.0, -inf, 1.0], [-inf] * 3]
    x, target = torch.tensor(logits, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    loss, dlogits = loss_and_gradient(x, target, path)
    x = x.double().requires_grad_()
    want = cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=0.0, equal_nan=True)
    (dwant,) = torch.autograd.grad(want.sum(), x)
    torch.testing.assert_close(dlogits[3:5].double(), dwant[3:5], rtol=1e-6, atol=1e-7)
    assert dlogits.isnan().any(dim=1).tolist() == dwant.isnan().any(dim=1).tolist()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_few_wide_rows_are_cut_into_parts_that_merge(num_rows, device):
    logits = 3.0 * torch.randn(num_rows, 3 * 2048 + 100, device=device)
    target = torch.tensor([6000, 0, 4095, 4096, 6243], device=device)[:num_rows]
    got, _ = loss_and_gradient(logits, target, "triton", label_smoothing=0.1)
    want = cross_entropy(logits.double(), target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(got.double(), want, rtol=SINGLE, atol=0.0)


def test_the_reference_has_a_second_derivative():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, -100, 4])
    for options in ({}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "vocab_size": 4}):
        target[2] = 3
        assert torch.autograd.gradgradcheck(
            lambda x: fused_vocab_parallel_cross_entropy(x, target, **options),  # noqa: B023
            logits,
        )


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    logits = memory.as_strided((3, 4), (2**30, 1), 2**31)
    logits.copy_(torch.tensor([8.0, 0.0, 0.0, -math.inf]))
    loss, dlogits = loss_and_gradient(logits, torch.zeros(3, dtype=torch.int64), "triton")
    assert loss.tolist() == pytest.approx([math.log1p(2.0 * math.exp(-8.0))] * 3, rel=1e-5)
    other = 1.0 / (math.exp(8.0) + 2.0)
    want = torch.tensor([-2.0 * other, other, other, 0.0], dtype=torch.float16).expand(3, 4)
    torch.testing.assert_close(dlogits, want, rtol=1e-3, atol=0.0)


def two_collectives(logits: Tensor, target: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """The standard algorithm with two collectives, on one rank."""
    x, top = fusions.calculate_logits_max(logits)
    mask, column, sums, exponentials = fusions.calculate_predicted_logits(x, target, top, 0, logits.shape[-1])
    softmax, loss = fusions.calculate_cross_entropy_loss(exponentials, sums)
    return loss, fusions.calculate_gradients(softmax, dloss, mask, column)


def test_the_two_collective_steps_agree_and_write_to_nothing():
    logits, target = torch.randn(4, 3, 17), torch.randint(17, (4, 3))
    dloss, before = torch.randn(4, 3), logits.clone()
    loss, dlogits = two_collectives(logits, target, dloss)
    x = logits.clone().requires_grad_()
    fused = fused_vocab_parallel_cross_entropy(x, target)
    torch.testing.assert_close(loss, fused.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dlogits, torch.autograd.grad(fused, x, dloss)[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


def refused(error: type[Exception], message: str, *shapes: Sequence[int], **options: Any) -> None:
    logits, target = (*shapes, (2, 5), (2,))[:2] if len(shapes) < 2 else shapes
    made = options.pop("target", torch.zeros(target, dtype=torch.int64))
    with pytest.raises(error, match=message):
        fused_vocab_parallel_cross_entropy(options.pop("logits", torch.zeros(logits)), made, **options)


def test_tensors_that_do_not_fit_are_refused():
    refused(ShapeError, r"target must be \[2\], one for each row of vocab_parallel_logits; got \[3\]", (2, 5), (3,))
    refused(ShapeError, r"must be \[\.\.\., V/tp\], one logit per vocabulary entry; got \[\]", (), ())
    refused(ShapeError, r"the vocabulary must not be empty; got 0 columns", (2, 0), (2,))
    refused(ShapeError, r"target must be int64; got torch.int32; use target.long\(\)", target=torch.zeros(2).int())
    refused(
        ShapeError, r"must be float16, bfloat16, float32 or float64; got torch.int64", logits=torch.zeros(2, 5).long()
    )
    refused(ShapeError, r"must be on one device", target=torch.zeros(2, dtype=torch.int64, device="meta"))
    refused(ShapeError, r"rank 0 of 1 has 5 columns .* of 6; it must have 6, .* pass vocab_start", vocab_size=6)


def test_options_out_of_their_range_are_refused():
    refused(ConfigError, r"label_smoothing must be in \[0, 1\]; got 1.5", label_smoothing=1.5)
    refused(ConfigError, r"smoothing must be one of torch, nemo; got 'mean'", smoothing="mean")
    refused(ConfigError, r"'nemo' needs .*got vocab_size=1", smoothing="nemo", label_smoothing=0.1, vocab_size=1)
    refused(ConfigError, r"z_loss must be 0 or more, and finite; got -1.0", z_loss=-1.0)
    refused(ConfigError, r"softcap must be positive and finite, or None for no cap; got 0.0", softcap=0.0)
    refused(ConfigError, r"vocab_size must be positive, or None for all columns; got 0", vocab_size=0)
    refused(ConfigError, r"vocab_start requires vocab_size", vocab_start=0)
    refused(ConfigError, r"vocab_start must be 0 or more; got -5", vocab_start=-5, vocab_size=5)
    refused(BackendError, r"vocab_parallel_cross_entropy cannot run with backend='aten'", backend="aten")


@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_code_for_one_part_of_the_vocabulary_serves_all(smoothing):
    T, n = 6, 40
    logits, dloss = torch.randn(T, n), torch.randn(T)
    target = torch.randint(3 * n, (T,))

    def of_part(path: str, start: int) -> tuple[Tensor, Tensor]:
        part = start, 3 * n, math.inf, -100
        found = statistics(RUNNERS[path], logits, target, *part, bool(smoothing))
        gradient = torch.empty_like(logits)
        gradient_into(RUNNERS[path], gradient, dloss, logits, target, found, *part, smoothing, 0.0)
        return found, gradient

    of_part("compiled", 0)
    with builds(0):
        found = [of_part("compiled", start) for start in (0, n, 2 * n)]
    torch.testing.assert_close(found, [of_part("blocked", start) for start in (0, n, 2 * n)])
