"""Attention on a CPU, under torch.compile and in bfloat16; test_fused_attention.py checks its numbers."""

import pytest
import torch
from torch import Tensor

from megalith.fusions import fused_attention
from megalith.fusions.attention import flash_for_cpu
from megalith.fusions.attention.attention import attention_gradients


@pytest.mark.parametrize("window", [2**30, 2], ids=["one tile", "several"])
@pytest.mark.parametrize("Dv", [5, 8, 11])
def test_values_of_any_head_size_are_in_the_memory_that_the_compiler_is_told_of(Dv, window):
    q, k = torch.randn(2, 6, 2, 4, 8)
    v = torch.randn(6, 2, 4, Dv)
    arguments = (q, k, v, None, None, 0.5, None, window, 0)
    inputs = tuple(x.requires_grad_() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(torch.ops.megalith.attention_for_cpu.default, inputs)


@pytest.mark.parametrize("window", [None, (100, 0)], ids=["one tile", "masked tiles"])
@pytest.mark.parametrize(("S", "amx", "widened"), [(191, True, True), (192, True, False), (192, False, True)])
def test_the_backward_of_bfloat16_is_that_of_float32_where_it_is_faster(S, amx, widened, window, monkeypatch):
    monkeypatch.setattr(flash_for_cpu, "has_amx", lambda: amx)
    q, k, v = (x.bfloat16().requires_grad_() for x in torch.randn(3, S, 2, 4, 16))
    out, lse = fused_attention(q, k, v, window=window)
    dout = torch.randn(out.shape).bfloat16()
    saved = [x.detach().float() for x in (out, lse)]
    exact = attention_gradients(dout.float(), q.float(), k.float(), v.float(), *saved, window=window)
    got = torch.autograd.grad(out, (q, k, v), dout)
    rounded = [torch.equal(x, y.bfloat16()) for x, y in zip(got, exact, strict=True)]
    assert all(rounded) if widened else not any(rounded)
