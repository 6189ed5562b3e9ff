"""fused_attention with a softcap: compared with float64 with every option, at both extremes, and on a CPU."""

import functools
import math

import pytest
import torch

from megalith.errors import BackendError
from megalith.fusions import fused_attention
from megalith.fusions.attention.paths import CAPPED_FUSION
from megalith.fusions.core.dispatch import _tell
from tests.fusions.attention.cases_of_attention import formula
from tests.fusions.attention.test_fused_attention import OPTIONS, assert_near, in_double, qkv, with_gradients

CAPPED_PATHS = ("triton", "reference")
# kernels take seconds in the interpreter: each dtype once, with the least work, and with a window
IN_MAKE_TEST = {(torch.float32, "window ahead"), (torch.bfloat16, "all keys")}
CASES = [
    pytest.param(
        path, dtype, name, marks=() if path == "reference" or (dtype, name) in IN_MAKE_TEST else pytest.mark.slow
    )
    for path in CAPPED_PATHS
    for dtype in (torch.float32, torch.bfloat16)
    for name in OPTIONS
]


@pytest.mark.parametrize(("backend", "dtype", "name"), CASES, ids=str)
def test_a_softcap_goes_with_every_option(backend, dtype, name, device):
    leaves = qkv(129, 191, (4, 2), dtype=dtype, device=device)
    options = OPTIONS[name] | {"softcap": 0.8}  # below the larger half of the scores
    got = with_gradients(functools.partial(fused_attention, backend=backend, **options), leaves)
    assert_near(got, with_gradients(functools.partial(formula, **options), in_double(leaves)), dtype)


@pytest.mark.parametrize("backend", CAPPED_PATHS)
def test_a_softcap_leaves_small_scores_and_makes_large_ones_equal(backend, device):
    q, k, v = (x.detach() for x in qkv(7, device=device))
    torch.testing.assert_close(fused_attention(q, k, v, softcap=1e4, backend=backend), fused_attention(q, k, v))
    # every score is 2e3 or more, and 5 after the cap, so all keys have the same weight
    out, lse = fused_attention(q.abs() + 1, k.abs() + 1, v, causal=False, scale=1e3, softcap=5.0, backend=backend)
    torch.testing.assert_close(out, v.mean(dim=0).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 5.0 + math.log(7)))


def test_a_softcap_on_a_cpu_takes_the_reference_and_says_what_that_costs(caplog):
    q, k, v = (x.detach() for x in qkv(7))
    _tell.cache_clear()
    fused_attention(q, k, v, softcap=5.0)
    assert "attention falls back to its reference in plain torch: torch's kernels do not support softcap" in caplog.text
    assert CAPPED_FUSION.default(q) == "reference"
    with pytest.raises(BackendError, match=r"no such path, only triton, reference; use .*reference instead"):
        fused_attention(q, k, v, softcap=5.0, backend="aten")
