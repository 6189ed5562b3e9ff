"""CPUs that attention is told it runs on, and what it computes by products there."""

from megalith.fusions.attention import flash_for_cpu
from megalith.fusions.attention.products_for_cpu import attention_by_products, gradients_by_products

AMX, AVX512_BF16, NEITHER = "AMX", "AVX512-BF16", "neither"  # a CPU's instructions for bfloat16
CPUS = [AMX, AVX512_BF16, NEITHER]


def pretend(monkeypatch, cpu):
    """Lets attention take this CPU for one with these instructions, which decides how it computes."""
    monkeypatch.setattr(flash_for_cpu, "_has_amx", lambda: cpu == AMX)
    monkeypatch.setattr(flash_for_cpu, "_multiplies_bfloat16", lambda: cpu != NEITHER)


def lengths_given_to_products(monkeypatch, fewest_queries=1, function=gradients_by_products):
    """A list that grows by the number of queries with each call of ``function``, for calls of at least so many."""
    lengths = []

    def recorded(*operands, **options):
        q = operands[0 if function is attention_by_products else 2]
        lengths.append(len(q))
        return function(*operands, **options)

    monkeypatch.setattr(flash_for_cpu, function.__name__, recorded)
    monkeypatch.setattr(flash_for_cpu, "_FEWEST_QUERIES", fewest_queries)
    return lengths
