"""torch_compat: names that differ between torch 2.11 and 2.13; ours give no warnings on either."""

import inspect
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from megalith.fusions.core.compiler import why_not_compile
from megalith.torch_compat.compiled_ahead import can_compile_ahead, compile_ahead, load_ahead
from megalith.torch_compat.compiler import compile_apart
from megalith.torch_compat.distributed import all_gather_into, reduce_scatter_into
from megalith.torch_compat.live_tensors import bytes_of_tensors
from megalith.torch_compat.tensors import fake_tensors, grouped_mm, linear_in_onednn, multiplies_natively
from tests.rank_pool import ranks

# (new name since 2.13, old name until then): 2.13 has both, and warns for the old ones
RENAMED = [
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
]


@pytest.mark.parametrize(("new", "old"), RENAMED)
def test_this_torch_has_one_of_the_names(new, old):
    assert hasattr(dist, new) or hasattr(dist, old)


def gather_and_scatter() -> tuple[list[float], list[float]]:
    rank, W = dist.get_rank(), dist.get_world_size()
    gathered, scattered = torch.empty(2 * W), torch.empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_gather_into(gathered, torch.tensor([10.0 * rank, 10.0 * rank + 1]), dist.group.WORLD)
        reduce_scatter_into(scattered, torch.arange(W) + 1.0 * rank, dist.group.WORLD)
    return gathered.tolist(), scattered.tolist()


def test_they_gather_and_scatter_without_a_warning():
    assert ranks(2, gather_and_scatter) == [([0, 1, 10, 11], [1]), ([0, 1, 10, 11], [3])]


def test_this_torch_multiplies_groups_of_rows():
    assert hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")
    a, b, ends = torch.ones(4, 8), torch.stack([torch.ones(8, 4), torch.full((8, 4), 2.0)]), torch.tensor([1, 4])
    assert grouped_mm(a, b, ends.int())[:, 0].tolist() == [8, 16, 16, 16]
    assert grouped_mm(a.t(), a, ends.int())[:, 0, 0].tolist() == [1, 3]


@pytest.mark.parametrize("fake", [False, True])
def test_live_tensors_are_counted_without_the_model_and_its_gradients(fake):
    with fake_tensors() if fake else nullcontext():
        model = torch.nn.Linear(100, 100, bias=False)
        x = torch.zeros(10, 100)
        with bytes_of_tensors(model) as counted:
            assert (counted("current"), counted("peak")) == (0, 0)
            y = model(x)
            view = y[2:]
            assert counted("current") == 4 * 1000
            large = torch.zeros(5000)
            del large
            assert (counted("current"), counted("peak")) == (4 * 1000, 4 * 6000)
            dy = torch.ones(10, 100)
            y.backward(dy)
            assert model.weight.grad.shape == (100, 100)
            assert counted("current") == 4 * 2000
            del y
            assert counted("current") == 4 * 2000
            del view, dy
            assert counted("current") == 0
            # the total is largest with the gradient, which is not counted
            assert counted("peak") == 4 * 2000


def test_a_gradient_is_not_counted_at_a_peak_after_which_much_is_freed():
    with fake_tensors():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 20_000))
        with bytes_of_tensors(model) as counted:
            model(torch.zeros(4, 64)).sum().backward()
            assert counted("peak") < 4 * 20_000 * 64 // 4  # of the head's weight


@pytest.mark.skipif(not multiplies_natively(torch.bfloat16), reason="the CPU has no instructions for bfloat16")
def test_this_torch_adds_a_bias_in_a_product_of_onednn():
    x, weight, bias = (
        torch.full(size, value).bfloat16() for size, value in (((2, 4), 1.0), ((3, 4), 1.0), ((3,), 256))
    )
    y = linear_in_onednn(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[260.0] * 3] * 2


def test_this_torch_can_end_a_backward_by_hand():
    """What it does is tested in tests/parallel/sharding/test_fsdp.py."""
    assert "_get_fsdp_state" in vars(FSDPModule)
    assert "_root_post_backward_final_callback" in vars(FSDPState)


def test_a_compiler_of_its_own_is_asked_for_where_torch_has_one():
    options = inspect.signature(torch.compile).parameters
    assert ("isolate_recompiles" in options) == ("recompile_limit" in options)  # both new in 2.13
    assert compile_apart(torch.neg)  # neither is passed where it does not exist


def test_this_torch_compiles_ahead_of_the_call_since_2_13():
    assert can_compile_ahead() == ("isolate_recompiles" in inspect.signature(torch.compile).parameters)


@pytest.mark.skipif(not can_compile_ahead(), reason="torch 2.11 compiles at the call, unless it is told otherwise")
@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
def test_code_that_was_compiled_ahead_of_the_call_is_kept(tmp_path):
    x = torch.arange(6.0)
    compile_ahead(one_more, (x,)).save(tmp_path / "one more")
    loaded = load_ahead(tmp_path / "one more", one_more)
    assert loaded.fits(x)
    assert not loaded.fits(x.double())
    assert loaded.run(x).tolist() == [1, 2, 3, 4, 5, 6]


def one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
def test_a_compiled_product_is_not_rounded_before_the_sum_that_it_goes_into():
    def formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * a + b

    a = torch.full((64,), 1.0 + 2.0**-12)
    b = torch.full((64,), -(1.0 + 2.0**-11))
    assert formula(a, b)[0] == 0.0  # a^2 = 1 + 2^-11 + 2^-24 needs a 25th bit
    assert compile_apart(formula)(a, b)[0] == 2.0**-24
