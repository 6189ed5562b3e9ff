"""grouped_matmul: its own properties, in addition to those that test_every_fusion.py checks for all operations."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith import fusions
from megalith.errors import BackendError, ShapeError
from megalith.fusions import grouped_matmul
from megalith.fusions.core import dispatch
from megalith.fusions.core.devices import is_hopper
from megalith.fusions.experts.grouped_matmul import FUSION, _Sizes
from megalith.fusions.experts.kernels.clear_rows import clear_after_
from tests.accuracy import assert_accurate
from tests.fusions.experts.cases_of_grouped_matmul import formula
from tests.fusions.observe import operator_calls, saved_bytes
from tests.kernel_reports import in_interpreter, traffic

E, H, F = 3, 8, 16  # aligned for torch's operator
NAN, INF = float("nan"), float("inf")
ON_GPU = torch.cuda.is_available()
# on a GPU torch's operator takes bfloat16 only; test_every_fusion.py has that
PATHS = ("triton", *(() if ON_GPU else ("aten",)), "blocked", "reference")
on_every_path = pytest.mark.parametrize("path", PATHS)


def sizes_of(*sizes: int, device: str) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32, device=device)


def example(R: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(R, H, generator=generator), torch.randn(E, F, H, generator=generator)
    return x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_()


@on_every_path
def test_values_worked_out_by_hand(path, device):
    x = torch.tensor([[1.0, 2, 0, 0], [3, 4, 0, 0], [5, 6, 0, 0]], device=device, requires_grad=True)
    weight = torch.zeros(2, 4, 4, device=device)
    weight[0, 0, 0], weight[0, 1, 1], weight[1, 0, 1] = 1.0, 10.0, 100.0
    weight.requires_grad_()
    y = grouped_matmul(x, weight, sizes_of(1, 2, device=device), backend=path)
    assert y.tolist() == [[1, 20, 0, 0], [400, 0, 0, 0], [600, 0, 0, 0]]
    dy = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]], device=device)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert dx.tolist() == [[1, 10, 0, 0], [0, 100, 0, 0], [0, 200, 0, 0]]
    assert dweight[:, :2, :2].tolist() == [[[1, 2], [1, 2]], [[13, 16], [0, 0]]]


@on_every_path
def test_garbage_in_gaps_reaches_nobody(path, device):
    x, weight = example(6, device)
    sizes = sizes_of(2, 0, 2, device=device)
    with torch.no_grad():
        x[4:] = NAN
    dy = torch.ones(6, F, device=device)
    dy[4:] = INF
    y = grouped_matmul(x, weight, sizes, backend=path)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert not y[4:].any()
    assert not dx[4:].any()
    alone = x[:4].detach().requires_grad_()
    want = formula(alone, weight, sizes)
    wanted = torch.autograd.grad(want, (alone, weight), dy[:4])
    torch.testing.assert_close((y[:4], dx[:4], dweight), (want, *wanted))
    assert not dweight[1].any()  # it has no rows


@on_every_path
def test_what_is_not_finite_stays_with_its_expert(path, device):
    x, weight = example(4, device)
    with torch.no_grad():
        x[0, 0], weight[2, 0, 0] = NAN, NAN
    y = grouped_matmul(x, weight, sizes_of(1, 2, 1, device=device), backend=path)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y[0].isnan().all()
    assert y[3, 0].isnan()
    assert y[1:3].isfinite().all()
    assert dx[:3].isfinite().all()
    assert dweight[0, :, 0].isnan().all()
    assert dweight[1:].isfinite().all()


@on_every_path
def test_without_rows_every_weight_has_a_gradient_of_zeros(path, device):
    x, weight = example(0, device)
    y = grouped_matmul(x, weight, sizes_of(0, 0, 0, device=device), backend=path)
    y.sum().backward()
    assert y.shape == (0, F)
    assert weight.grad is not None
    assert not weight.grad.any()


@on_every_path
def test_rows_that_are_counted_past_the_last_one_are_ignored(path, device):
    x, weight = example(5, device)
    too_many, just = sizes_of(2, 9, 7, device=device), sizes_of(2, 3, 0, device=device)
    y, want = (grouped_matmul(x, weight, sizes, backend=path) for sizes in (too_many, just))
    assert y.equal(want)
    for got, expected in zip(*(torch.autograd.grad(one.sum(), (x, weight)) for one in (y, want)), strict=True):
        assert got.equal(expected)


@on_every_path
def test_what_is_used_twice_has_the_sum_of_its_gradients(path, device):
    x, weight = example(5, device)
    sizes = sizes_of(2, 2, 1, device=device)
    once = torch.autograd.grad(grouped_matmul(x, weight, sizes, backend=path).sum(), (x, weight))
    y = grouped_matmul(x, weight, sizes, backend=path) + 2 * grouped_matmul(x, weight, sizes, backend=path)
    twice = torch.autograd.grad(y.sum(), (x, weight))
    torch.testing.assert_close(twice, tuple(3 * g for g in once))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["triton", "blocked", "reference"])
def test_experts_of_many_tiles_and_sizes_that_no_block_divides(path, dtype, device):
    torch.manual_seed(0)
    sizes = sizes_of(0, 150, 1, 64, 0, 33, 0, device=device)
    x = torch.randn(260, 70, device=device).to(dtype).requires_grad_()
    weight = torch.randn(7, 133, 70, device=device).to(dtype).requires_grad_()
    dy = torch.randn(260, 133, device=device).to(dtype)
    y = grouped_matmul(x, weight, sizes, backend=path)
    got = (y, *torch.autograd.grad(y, (x, weight), dy))
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    want = formula(*exact, sizes)
    wanted = (want, *torch.autograd.grad(want, exact, dy.double()))
    for value, expected, terms in zip(got, wanted, (70, 133, 150), strict=True):
        assert_accurate(value.detach(), expected.detach(), terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][ON_GPU:])
def test_rows_that_begin_anywhere_and_repeat_are_taken_by_torchs_operator(dtype, device):
    x, weight = example(5, device, dtype)
    sizes = sizes_of(2, 0, 2, device=device)
    want = grouped_matmul(x, weight, sizes, backend="aten")
    memory = torch.zeros(5 * (H + 1) + 1, device=device, dtype=dtype)
    apart = memory.as_strided((5, H), (H + 1, 1), 1).copy_(x.detach()).requires_grad_()
    y = grouped_matmul(apart, weight, sizes, backend="aten")
    assert y.equal(want)
    dy = torch.arange(F, device=device, dtype=dtype)
    for repeated in (dy.expand(5, F), dy[:1].expand(5, F)):
        got = torch.autograd.grad(y, (apart, weight), repeated, retain_graph=True)
        wanted = torch.autograd.grad(want, (x, weight), repeated.contiguous(), retain_graph=True)
        assert all(map(torch.equal, got, wanted))


def path_taken(x: Tensor, weight: Tensor, sizes: Tensor) -> str:
    ((operator, _),) = operator_calls(lambda: grouped_matmul(x, weight, sizes))
    return str(operator)


def test_on_a_cpu_torchs_operator_is_the_default_where_it_can_run_and_else_the_loop():
    x, weight = example(4, "cpu")
    sizes = sizes_of(1, 2, 1, device="cpu")
    assert "grouped_matmul_aten" in path_taken(x, weight, sizes)
    assert "grouped_matmul_aten" in path_taken(x.bfloat16(), weight.bfloat16(), sizes)
    assert "grouped_matmul_blocked" in path_taken(x[:, :6], weight[:, :, :6], sizes)
    assert "grouped_matmul_blocked" in path_taken(x[:, :4].half(), weight[:, :, :4].half(), sizes)
    with pytest.raises(BackendError, match=r"multiples of 4; got 6 and 16; use .*blocked"):
        grouped_matmul(x[:, :6], weight[:, :, :6], sizes, backend="aten")
    with pytest.raises(BackendError, match=r"float32, bfloat16, float16; got torch.float64"):
        grouped_matmul(x.double(), weight.double(), sizes, backend="aten")
    with fusions.use("aten"):
        assert "grouped_matmul_blocked" in path_taken(x[:, :6], weight[:, :, :6], sizes)


def default_on_a_gpu(dtype: torch.dtype = torch.bfloat16, F: int = F, E: int = E) -> str:
    return FUSION.default(_Sizes(torch.device("cuda", 0), dtype, 4, H, F, E))


def test_on_a_hopper_gpu_torchs_operator_is_the_default_where_it_does_not_wait_for_the_gpu(monkeypatch):
    assert default_on_a_gpu() == ("aten" if is_hopper(torch.device("cuda", 0)) else "triton")
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    assert default_on_a_gpu() == "aten"
    assert default_on_a_gpu(dtype=torch.float16) == "triton"
    assert default_on_a_gpu(F=12) == "triton"
    assert default_on_a_gpu(E=1024) == "triton"
    with pytest.raises(BackendError, match=r"on cuda torch's operator supports bfloat16; got torch\.float32"):
        FUSION.path(_Sizes(torch.device("cuda", 0), torch.float32, 4, H, F, E), "aten")
    with pytest.raises(BackendError, match="at most 1023 experts; got 1024"):
        FUSION.path(_Sizes(torch.device("cuda", 0), torch.bfloat16, 4, H, F, 1024), "aten")


@pytest.mark.parametrize("end", [0, 5, 16, 40])
def test_rows_after_the_last_expert_are_cleared_and_others_are_not_read(end, device):
    y = torch.full((40, 600), NAN, device=device)
    y[:end] = 1.0
    clear_after_(y, torch.tensor([0, end], dtype=torch.int32, device=device))
    assert y.equal((torch.arange(40, device=device) < end).to(y.dtype).unsqueeze(1).expand(40, 600))


@pytest.mark.parametrize("path", [path for path in PATHS if path != "reference"])
def test_only_gradients_that_are_wanted_are_made(path, device):
    x, weight = example(5, device)
    sizes = sizes_of(2, 2, 1, device=device)
    want = torch.autograd.grad(grouped_matmul(x, weight, sizes, backend=path).sum(), (x, weight))
    (dx,) = torch.autograd.grad(grouped_matmul(x, weight.detach(), sizes, backend=path).sum(), x)
    (dweight,) = torch.autograd.grad(grouped_matmul(x.detach(), weight, sizes, backend=path).sum(), weight)
    assert dx.equal(want[0])
    assert dweight.equal(want[1])


@pytest.mark.parametrize("path", [path for path in PATHS if path != "reference"])
def test_its_operands_and_nothing_else_are_kept(path, device):
    x, weight = example(5, device)
    sizes = sizes_of(2, 2, 1, device=device)
    kept = saved_bytes(lambda: grouped_matmul(x, weight, sizes, backend=path))
    assert kept == x.nbytes + weight.nbytes + sizes.nbytes


class NoShapeFromValues(TorchDispatchMode):
    """Refuses operators whose results have a shape that depends on values, such as indexing with a mask."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        assert torch.Tag.dynamic_output_shape not in operator.tags, f"on a GPU, the host would wait for {operator}"
        return operator(*args, **kwargs or {})


@in_interpreter
@pytest.mark.parametrize("path", ["triton", "reference"])
def test_no_size_is_read_by_the_host(path, monkeypatch):
    x, weight = example(5, "cpu")
    sizes = sizes_of(2, 2, 1, device="cpu")

    def refuse(*_: object) -> None:
        raise AssertionError("the host would wait for the device")

    for name in ("item", "tolist", "__int__", "__index__", "__bool__"):
        monkeypatch.setattr(Tensor, name, refuse)
    with NoShapeFromValues():
        y = grouped_matmul(x, weight, sizes, backend=path)
        torch.autograd.grad(y, (x, weight), torch.ones_like(y))


@in_interpreter
def test_tiles_write_each_result_once_and_none_of_another_expert():
    # in the interpreter the last write wins; on a GPU, any may
    x, weight = example(70, "cpu")
    sizes = sizes_of(3, 0, 65, device="cpu")
    found: list[Tensor] = []
    forward = traffic(lambda: found.append(grouped_matmul(x, weight, sizes, backend="triton")), (x, weight, sizes))
    dy = torch.ones(70, F)
    backward = traffic(lambda: torch.autograd.backward(found, [dy]), (x, weight, sizes, dy))
    assert forward.visits == backward.visits == 1


@on_every_path
def test_autocast_does_not_reach_inside(path, device):
    x, weight = example(5, device)
    sizes = sizes_of(2, 2, 1, device=device)
    want = grouped_matmul(x, weight, sizes, backend=path)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = grouped_matmul(x, weight, sizes, backend=path)
    assert got.equal(want)
    gradients = (torch.autograd.grad(y.sum(), (x, weight)) for y in (got, want))
    assert all(map(torch.equal, *gradients))


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    far = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0)
    weight = far.unsqueeze(1).detach().requires_grad_()  # [3, 1, 4]
    x = far.detach().requires_grad_()
    y = grouped_matmul(x, weight, sizes_of(1, 1, 1, device="cpu"), backend="triton")
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert y.tolist() == [[16.0]] * 3
    assert dx.tolist() == dweight.flatten(1).tolist() == [[2.0] * 4] * 3


def test_the_rows_of_permute_are_its_rows(device):
    torch.manual_seed(0)
    tokens = torch.randn(12, H, device=device)
    indices = torch.rand(12, E, device=device).argsort(dim=1)[:, :2]
    weight = torch.randn(E, F, H, device=device)
    rows, _, row_map = fusions.permute(tokens, indices, None, 40, num_experts=E, pad_multiple=4)
    y = fusions.unpermute(grouped_matmul(rows, weight, row_map.rows_per_expert), row_map)
    want = torch.stack(
        [sum(token @ weight[e].t() for e in of) for token, of in zip(tokens, indices.tolist(), strict=True)]
    )
    torch.testing.assert_close(y, want)


def test_what_does_not_fit_is_refused():
    x, weight = example(4, "cpu")
    sizes = sizes_of(1, 2, 1, device="cpu")

    def refused(message: str, *given: Any) -> None:
        with pytest.raises(ShapeError, match=message):
            grouped_matmul(*given)

    refused(r"x must be \[R, H\] and weight .* got \[4, 7\] and \[3, 16, 8\]", x[:, :7], weight, sizes)
    refused(r"and E at least 1; got \[4, 8\] and \[0, 16, 8\]", x, weight[:0], sizes[:0])
    refused(r"got \[4, 8\] and \[16, 8\]", x, weight[0], sizes)
    refused(r"weight must be torch.float32, like x; got torch.bfloat16; cast one of them", x, weight.bfloat16(), sizes)
    refused(r"rows_per_expert must be \[3\], one for each expert of weight; got \[2\]", x, weight, sizes[:2])
    refused(r"rows_per_expert must be int32, as returned by row_map; got torch.int64", x, weight, sizes.long())
    refused(r"x must be float16, .*; got torch.int32", x.int(), weight, sizes)
    refused(r"on one device; .*rows_per_expert on meta", x, weight, sizes.to("meta"))
