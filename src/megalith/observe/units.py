"""Formats numbers for people: ``12.3k``, ``4.01M``, ``1.23 MJ``, ``4 min 10 s``; and computes perplexity."""

import math

__all__ = ["duration", "energy", "gibibytes", "perplexity", "quantity"]

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float) -> str:
    """``value`` to three significant digits with a decimal suffix: 999 -> "999", 12345 -> "12.3k", 4e6 -> "4.00M"."""
    for size, suffix in _SUFFIXES:
        # 999,600 rounds to 1.00M, not to 1000k
        if math.isfinite(value) and abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + suffix
    return f"{value:.3g}"


def energy(joules: float) -> str:
    """``joules`` to three significant digits with a decimal prefix: 523.4 -> "523 J", 1.234e6 -> "1.23 MJ"."""
    number = quantity(joules)
    digits = number.rstrip("kMGTP")
    return f"{digits} {number[len(digits) :]}J"


def gibibytes(num_bytes: float) -> str:
    """``num_bytes`` in GiB: 3e8 -> "0.28 GiB", 8.4e10 -> "78.2 GiB", 2e12 -> "1,863 GiB"."""
    value = num_bytes / 2**30
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} GiB"


def perplexity(loss: float) -> float:
    """exp(``loss``), with ``loss`` in nats per token; inf on overflow, NaN for NaN."""
    return math.inf if loss >= 700.0 else math.exp(loss)


def duration(seconds: float) -> str:
    """``seconds`` in its largest units: 7500 -> "2 h 5 min", 250 -> "4 min 10 s", 3.21 -> "3.2 s", 0.041 -> "41 ms"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, part_size, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part_size} {part_unit}"
    return f"{whole} s"
