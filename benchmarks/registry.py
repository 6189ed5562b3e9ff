"""All cases."""

from benchmarks import encoders, experts, generation, moe_step, step
from benchmarks.case import Case

__all__ = ["CASES"]

CASES: dict[str, Case] = {
    "step": step.CASE,
    "moe-step": moe_step.CASE,
    **generation.CASES,
    **experts.CASES,
    **encoders.CASES,
}
