"""elementary: log, cos and sin match torch in float64, and consist, like initialization, of exact operations."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.numerics import initialization
from megalith.numerics.elementary import cos_sin_of_turn, log

BITS = 24  # the bits of a word that initialization uses
EXACT = 2e-10  # fifty times finer than half a unit in the last place of float32, in which results are stored
# IEEE 754 fixes the result of each to the last bit; frexp, comparisons and copies do not round
DEFINED = {"add", "sub", "mul", "div", "neg", "frexp", "to_copy", "full_like"}


@pytest.fixture(scope="module")
def numerators() -> torch.Tensor:
    """Every 61st possible value, and those at both ends and around each eighth of a turn."""
    ends = [torch.arange(-4, 5) + eighth * 2 ** (BITS - 3) for eighth in range(9)]
    found = torch.cat([torch.arange(0, 2**BITS, 61), *ends])
    return found[(found >= 0) & (found < 2**BITS)]


def test_log_is_that_of_torch(numerators):
    x = (numerators + 1).double() * 2.0**-BITS
    torch.testing.assert_close(log(x), torch.log(x), rtol=EXACT * 50, atol=1e-15)
    for power in (-1000, 0, 1000):
        scaled = torch.tensor([1.0, 1.1, 1.4142, 1.9999]).double() * 2.0**power
        torch.testing.assert_close(log(scaled), torch.log(scaled), rtol=EXACT, atol=1e-15)


def test_cos_and_sin_are_those_of_torch(numerators):
    angle = numerators.double() * (2 * math.pi / 2**BITS)
    cos, sin = cos_sin_of_turn(numerators, BITS)
    torch.testing.assert_close(cos, torch.cos(angle), rtol=0, atol=EXACT)
    torch.testing.assert_close(sin, torch.sin(angle), rtol=0, atol=EXACT)


class Recorded(TorchDispatchMode):
    """Records the names of the operations in the context."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found.add(operation.overloadpacket.__name__.strip("_"))
        assert "alpha" not in (kwargs or {}), "a product within a sum may be fused with it"
        return operation(*args, **(kwargs or {}))


def test_nothing_is_computed_by_an_operation_whose_last_bit_is_open():
    ones, quarters = torch.ones(3).double(), torch.arange(4)
    with Recorded() as recorded:
        log(ones)
        cos_sin_of_turn(quarters, 2)
    assert {"add", "mul", "div", "frexp"} <= recorded.found <= DEFINED, sorted(recorded.found - DEFINED)


def test_nor_are_first_weights():
    words = torch.randint(0, 2**32, (4, 3))
    with Recorded() as recorded:
        initialization._box_muller(*words)
    defined = DEFINED | {"sqrt", "clamp", "rshift", "unbind", "stack", "view"}
    assert {"frexp", "sqrt"} <= recorded.found <= defined, sorted(recorded.found - defined)
