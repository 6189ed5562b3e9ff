"""How close a result must be to float64, by the dtype that it is rounded to."""

import torch
from torch import Tensor

from megalith.optional import triton_interprets

# (largest relative error of an entry, relative L2 error) for float32 arithmetic and one rounding on store
TOLERANCE = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (3e-6, 1e-6),
    torch.float16: (4.9e-4, 2.3e-4),
    torch.bfloat16: (3.91e-3, 1.8e-3),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TINY = torch.finfo(torch.float64).tiny
LAST_DIGIT = torch.finfo(torch.float64).eps


def assert_same(got: Tensor, want: Tensor) -> None:
    """Bit for bit; on a GPU, whose compiler contracts products and sums into FMAs, to 2 ulp of 1 or of the value."""
    if got.is_cuda:
        digits = 2 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=digits, atol=digits, equal_nan=True)
    else:
        assert torch.equal(got, want)


def assert_accurate(got: Tensor, want: Tensor, terms: int = 1, cancels: bool = False, name: str = "") -> None:
    """``got`` equals ``want``, in float64, up to the rounding of its own dtype; each entry is a sum of ``terms`` terms.

    The error of an entry is relative to at least 1 % of the mean entry, or to the whole mean where the terms of a sum
    may cancel. ``cancels`` says the same of a float32 formula near its zeros, where cancellation has lost the digits.
    """
    assert want.dtype == torch.float64, f"{name}: the expectation must be float64, not {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite].nan_to_num(7.0), want[~finite].nan_to_num(7.0)), f"{name}: NaN or inf"
    # no error can be smaller than this, or than the last digit of the expected value itself, whose terms are about 1
    rounding = (want.to(got.dtype).double() - want).abs()[finite].clamp_min(LAST_DIGIT)
    got, want, dtype = got.double()[finite], want[finite], got.dtype
    if want.numel() == 0:
        return
    # errors of float32 sums grow with the root of their length; the interpreter truncates to bfloat16, a GPU rounds
    slack = max(1, terms) ** 0.5 * (2 if dtype == torch.bfloat16 and triton_interprets() else 1)
    entry, l2 = TOLERANCE[dtype]
    error, size = (got - want).abs(), want.abs()
    held_to_mean = terms > 1 or (cancels and dtype == torch.float32)
    size = size.clamp_min(max(TINY, size.mean().item() * (1 if held_to_mean else 0.01)))
    worst = (error / torch.maximum(entry * size, rounding)).max().item() / slack
    assert worst <= 1, f"{name}: error of an entry is {worst:.2f} times what is allowed"
    if want.numel() >= 1000:  # with fewer entries, even perfect rounding may exceed it
        # a few entries may dominate the norm and all be rounded badly; float32 adds its own error
        stored = _as_stored(want, dtype)
        perfect = (stored - want).norm().item() + TOLERANCE[torch.float32][1] * want.norm().item()
        allowed = max(l2 * want.norm().item(), perfect, TINY)
        mean = error.norm().item() / allowed / slack
        assert mean <= 1, f"{name}: L2 error is {mean:.2f} times what is allowed"


def _as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` cast to ``dtype`` and back; the interpreter's bfloat16 is the upper half of a float32."""
    if dtype == torch.bfloat16 and triton_interprets():
        return (x.float().view(torch.int32) & -(2**16)).view(torch.float32).double()
    return x.to(dtype).double()
