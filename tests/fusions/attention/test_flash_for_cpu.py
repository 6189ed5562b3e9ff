"""Attention on a CPU, under torch.compile; test_fused_attention.py checks its numbers."""

import pytest
import torch
from torch import Tensor

import megalith.fusions.attention.flash_for_cpu  # noqa: F401  registers the operator


@pytest.mark.parametrize("window", [2**30, 2], ids=["one tile", "several"])
@pytest.mark.parametrize("Dv", [5, 8, 11])
def test_values_of_any_head_size_are_in_the_memory_that_the_compiler_is_told_of(Dv, window):
    q, k = torch.randn(2, 6, 2, 4, 8)
    v = torch.randn(6, 2, 4, Dv)
    arguments = (q, k, v, None, None, 0.5, None, window, 0)
    inputs = tuple(x.requires_grad_() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(torch.ops.megalith.attention_for_cpu.default, inputs)
