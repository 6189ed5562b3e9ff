"""attention_gradients: backward through one part of the keys from the merged result, as autograd through the merge."""

from collections.abc import Hashable
from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions import fused_attention, merge_attention
from megalith.fusions.attention.attention import attention_gradients
from megalith.packed_seq_params import PackedSeqParams
from tests.sampling import sampled

SQ, B, A, G, D = 9, 3, 4, 2, 16
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
DOCUMENTS = PackedSeqParams.from_lengths([[4, 5], [9], [1, 1, 7]])
CAPPED = {"softcap": 0.8, "scale": 0.4}
# keys in the part, window, documents
PARTS = {
    "causal": (9, (-1, 0), None),
    "every key": (9, (-1, -1), None),
    "fewer keys": (5, (-1, -1), None),
    "more keys, window": (14, (3, 1), None),
    "fewer keys, window": (4, (6, 0), None),
    "documents": (9, (-1, 0), DOCUMENTS),
    "documents, window": (9, (2, 2), DOCUMENTS),
}


def example(num_keys: int) -> tuple[Tensor, ...]:
    """q, the part's k and v, other keys and values, and dout; in float64."""
    generator = torch.Generator().manual_seed(num_keys)
    shapes = ((SQ, A), (num_keys, G), (num_keys, G), (6, G), (6, G), (SQ, A))
    return tuple(torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for S, heads in shapes)


HOW = [
    ("reference", torch.float64, {}),
    ("aten", torch.float32, {"scale": 0.4}),
    ("triton", torch.float32, {}),
    ("aten", torch.bfloat16, {}),
    ("reference", torch.float64, CAPPED),
    ("triton", torch.float32, CAPPED),
]


def shown(case: tuple[tuple[str, torch.dtype, dict[str, float]], str]) -> set[Hashable]:
    """Each way to compute it, and each part on each path; for the slow kernels, only with documents and without."""
    how, part_of = case
    return {str(how), (how[0], PARTS[part_of][2] is None if how[0] == "triton" else part_of)}


@pytest.mark.parametrize(("how", "part_of"), sampled([*product(HOW, PARTS)], shown))
def test_it_is_the_gradient_through_a_merge(how, part_of, device):
    backend, dtype, of_scores = how
    num_keys, window, documents = PARTS[part_of]
    q, k, v, k_other, v_other, dout = example(num_keys)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sees = {"causal": False, "window": window, "packed_seq_params": documents, **of_scores}
    part = fused_attention(*leaves, **sees)
    # detached queries for the other part: q's gradient is only through this part
    merged = merge_attention(*part, *fused_attention(q.detach(), k_other, v_other, causal=False, **of_scores))
    want = torch.autograd.grad(merged[0], leaves, dout)
    narrow = [strided(x.detach().to(device, dtype)) for x in (dout, *leaves, merged[0])]
    lse = strided(merged[1].detach().to(device, torch.promote_types(dtype, torch.float32)))
    if documents is not None:
        sees["packed_seq_params"] = documents.to(device)
    got = attention_gradients(*narrow, lse, backend=backend, **sees)
    for gradient, expected in zip(got, want, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.cpu() - expected).norm() <= NEAR[dtype] * expected.norm()


def strided(x: Tensor) -> Tensor:
    """``x`` as a slice of a wider tensor, like the queries and rows of a block."""
    return torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[..., : x.shape[-1]]


def test_operands_that_do_not_fit_are_refused():
    q, k, v, *_ = example(5)
    with pytest.raises(ShapeError, match=r"v must be \[5, 3, 2, 'Dv'\]"):
        attention_gradients(q, q, k, v[:3], q, q[..., 0])
