"""The embedding head alone: its projection and norm, in 16 bits and for zeros."""

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, normalize

from megalith.models.heads import EmbeddingHead
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.models.test_bert_model import config

H = config().hidden_size


def head(dtype: torch.dtype = torch.float64, **given: Any) -> EmbeddingHead:
    found = EmbeddingHead(config(), BuildOptions(ProcessGroupCollection.single(), dtype), **given)
    for number, parameter in enumerate(found.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return found


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("normalizes", [True, False])
def test_a_state_is_projected_and_normalized(size, normalizes):
    module, x = head(size=size, normalize=normalizes), torch.randn(3, H, dtype=torch.float64)
    want = x if size is None else linear(x, module.projection.weight, module.projection.bias)
    torch.testing.assert_close(module(x), normalize(want, dim=-1) if normalizes else want)


def test_states_of_16_bits_are_normalized_in_float32():
    found = head(torch.bfloat16, size=None, normalize=True)(torch.randn(4, H).bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4), rtol=1e-6, atol=0)


def test_a_state_of_zeros_has_an_embedding_of_zeros():
    x = torch.zeros(1, H, dtype=torch.float64, requires_grad=True)
    found = head(size=None, normalize=True)(x)
    found.sum().backward()
    assert not found.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()
