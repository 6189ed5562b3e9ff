"""All cases."""

from benchmarks import encoders, experts, generation, step
from benchmarks.case import Case

__all__ = ["CASES"]

CASES: dict[str, Case] = {"step": step.CASE, **generation.CASES, **experts.CASES, **encoders.CASES}
