"""Sizes of tiles and numbers of programs, computed by launchers on the host.

Triton has functions with these names for host and kernels; since 3.6 a call on the host takes microseconds, because it
first unwraps the kernel's constants. A rotation of queries and keys and its gradient made twenty such calls, which was
a quarter of its time on the host.
"""

__all__ = ["cdiv", "next_power_of_2"]


def cdiv(x: int, y: int) -> int:
    """``x`` / ``y``, rounded up; also for the symbolic sizes of torch.compile, like the other function here."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least ``n`` (1 to 2^63)."""
    n -= 1
    for shift in (1, 2, 4, 8, 16, 32):
        n |= n >> shift
    return n + 1
