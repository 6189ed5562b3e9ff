"""Sizes of tiles and numbers of programs, computed by launchers on the host.

Triton has functions with these names for host and kernels. Since 3.6 they take microseconds on the host, because they
first unwrap a kernel's constants, and some launchers need ten of them.
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
