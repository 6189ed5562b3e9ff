"""fused_linear_cross_entropy: its own properties, in addition to those that test_every_fusion.py checks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.fusions.clock import memory_of
from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.cross_entropy.linear import FUSION
from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from tests.fusions.observe import operator_calls, saved_bytes

T, H, V = 10, 16, 200  # with three tokens in a chunk, four parts of the vocabulary: three of 64, and one of 8
every_chunked_path = pytest.mark.parametrize("path", ["triton", "blocked"])


def example(dtype: torch.dtype, device: str, V: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, T // 2, H, generator=generator).to(device, dtype)
    weight = torch.randn(V, H, generator=generator).to(device, dtype)
    bias = torch.randn(V, generator=generator).to(device, dtype)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.arange(T).view(2, -1).to(device)


@every_chunked_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_words", [V, 7])  # with fewer words than tokens, chunks of tokens take the place of parts
def test_it_is_the_loss_of_linear_with_sums_in_float32(dtype, num_words, path, device):
    x, weight, bias, target = example(dtype, device, num_words)
    target = target % num_words
    dloss = torch.randn(2, T // 2, generator=torch.Generator().manual_seed(4)).to(device)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 10.0, "backend": path}
    loss = fused_linear_cross_entropy(x, weight, target, bias=bias, chunk_size=3, **options)
    logits = linear(x, weight, bias)
    want = fused_vocab_parallel_cross_entropy(logits, target, **options)
    torch.testing.assert_close(loss, want, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=0.0)
    got = torch.autograd.grad(loss, (x, weight, bias), dloss)
    (dlogits,) = torch.autograd.grad(want, logits, dloss)
    exact = dlogits.detach().double().flatten(0, 1)
    rows, words = x.detach().double().flatten(0, 1), weight.detach().double()
    wanted = (exact @ words, exact.t() @ rows, exact.sum(dim=0))
    terms = (exact.abs() @ words.abs(), exact.abs().t() @ rows.abs(), exact.abs().sum(dim=0))
    eps = torch.finfo(dtype).eps
    for value, expected, of_terms in zip(got, wanted, terms, strict=True):
        # float32: a logit of up to 10 (the cap) is rounded by up to 10 eps in either computation, and its probability
        # changes by that fraction; 16 bits: two roundings, of a chunk's product, and of the sum of chunks
        allowed = 20 * of_terms if dtype == torch.float32 else 2 * (expected.abs() + expected.abs().mean())
        assert ((value.detach().double().view_as(expected) - expected).abs() <= eps * allowed).all()


@every_chunked_path
def test_an_upstream_gradient_of_each_token_is_right_also_the_second_time(path, device):
    x, weight, _, target = example(torch.float32, device)
    loss = fused_linear_cross_entropy(x, weight, target, chunk_size=4, backend=path)
    of_all = torch.autograd.grad(loss, (x, weight), torch.ones_like(loss), retain_graph=True)
    one_token = torch.zeros_like(loss)
    one_token[1, 2] = 3.0
    dx, dweight = torch.autograd.grad(loss, (x, weight), one_token)
    torch.testing.assert_close(dx[1, 2], 3.0 * of_all[0][1, 2])
    assert not dx[0].any()
    alone = fused_linear_cross_entropy(x[1, 2:3], weight, target[1, 2:3], backend=path)
    torch.testing.assert_close(dweight, torch.autograd.grad(3.0 * alone.sum(), weight)[0])


@every_chunked_path
def test_only_gradients_that_are_wanted_are_made(path, device):
    x, weight, bias, target = example(torch.float32, device)
    frozen = weight.detach()
    loss = fused_linear_cross_entropy(x, frozen, target, bias=bias, backend=path)
    dx, dbias = torch.autograd.grad(loss.sum(), (x, bias))
    assert dx.shape == x.shape
    assert dbias.shape == (V,)
    with torch.no_grad():
        calls = operator_calls(lambda: fused_linear_cross_entropy(x, weight, target, backend=path))
    assert len(calls) == 2  # statistics and loss


@every_chunked_path
def test_no_logits_are_kept(path, device):
    x, weight, bias, target = example(torch.bfloat16, device)
    kept = saved_bytes(lambda: fused_linear_cross_entropy(x, weight, target, bias=bias, backend=path))
    assert kept == x.nbytes + weight.nbytes + bias.nbytes + T * (12 + 8)


@every_chunked_path
def test_no_tensor_is_larger_than_a_chunk_of_logits(path, device):
    x = torch.randn(64, 4, device=device, requires_grad=True)
    weight, target = torch.randn(512, 4, device=device, requires_grad=True), torch.zeros(64, device=device).long()

    def step() -> None:
        fused_linear_cross_entropy(x, weight, target, chunk_size=8, backend=path).sum().backward()

    step()
    assert largest_allocation(step) <= 8 * 512 * 4


def test_the_logits_of_one_part_are_freed_before_those_of_the_next():
    x, weight = torch.randn(2048, 4, requires_grad=True), torch.randn(8192, 4, requires_grad=True)
    loss = fused_linear_cross_entropy(x, weight, torch.zeros(2048).long(), chunk_size=256, backend="blocked")
    chunk = 256 * 8192 * 4
    found = memory_of(lambda: torch.autograd.grad(loss.sum(), (x, weight), retain_graph=True), "cpu")
    assert chunk < found.peak < 1.5 * chunk


def largest_allocation(run: Any) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_the_path_is_chosen_by_the_logits_that_are_not_made():
    x, weight = torch.randn(64, 2), torch.randn(LARGEST_WHOLE // 64 + 1, 2)
    calls = operator_calls(lambda: fused_linear_cross_entropy(x, weight, torch.zeros(64).long()))
    assert len(calls) == 2
    calls = operator_calls(lambda: fused_linear_cross_entropy(x, weight[:-1], torch.zeros(64).long()))
    assert calls == []


@every_chunked_path
def test_autocast_does_not_reach_inside(path, device):
    x, weight, _, target = example(torch.float32, device)
    want = fused_linear_cross_entropy(x, weight, target, backend=path)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(x, weight, target, backend=path)
        got = torch.autograd.grad(loss.sum(), (x, weight))
    assert torch.equal(loss, want)
    assert all(map(torch.equal, got, torch.autograd.grad(want.sum(), (x, weight))))


def test_what_does_not_fit_is_refused():
    x, weight, bias, target = example(torch.float32, "cpu")

    def refused(error: type[Exception], message: str, *given: Tensor, **options: Any) -> None:
        with pytest.raises(error, match=message):
            fused_linear_cross_entropy(*(given or (x, weight, target)), **options)

    refused(ShapeError, r"with the same H; got \[2, 5, 16\] and \[200, 15\]", x, weight[:, :15], target)
    refused(ShapeError, r"with the same H; got \[2, 5, 16\] and \[16\]", x, weight[0], target)
    refused(ShapeError, r"weight must be torch.float32, like x; got torch.float64", x, weight.double(), target)
    refused(ShapeError, r"bias must be torch.float32, like x; got torch.bfloat16", bias=bias.bfloat16())
    refused(ShapeError, r"bias must be \[200\], one for each row of weight; got \[199\]", bias=bias[:199])
    refused(ShapeError, r"target must be \[2, 5\], one for each row of x; got \[5, 2\]", x, weight, target.t())
    refused(ShapeError, r"the vocabulary must not be empty; got 0 columns", x, weight[:0], target)
    refused(ShapeError, r"rank 0 of 1 has 200 columns of a vocabulary of 201", vocab_size=201)
    refused(
        ShapeError, r"with sequence_parallel, .*; got \[16\]", x[0, 0], weight, target[0, 0], sequence_parallel=True
    )
    refused(ConfigError, r"chunk_size must be 1 token or more, or None; got 0", chunk_size=0)
    refused(BackendError, r"linear_cross_entropy cannot run with backend='aten'", backend="aten")
    assert "aten" not in FUSION.paths
