"""``python -m benchmarks.fusions.pages``: writes the newest CPU results to the page of each operation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.fusions.operation import WITHOUT_COMPILER
from benchmarks.fusions.registry import OPERATIONS
from benchmarks.fusions.report import from_json, table

__all__ = ["FUSIONS_OF", "main", "newest", "section"]

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "fusions"
HEADING = "## Measured"
NAMES = ["Megalith", WITHOUT_COMPILER, "torch.compile"]
NEWLINE = "\n"

# page -> the operations of ``megalith.fusions.explain()`` that it documents
FUSIONS_OF: Mapping[str, Sequence[str]] = {
    "fused_adamw": ["adamw"],
    "fused_add_norm": ["add_norm"],
    "fused_attention": ["attention"],
    "fused_bias_dropout": ["bias_dropout_add"],
    "fused_bias_geglu": ["glu"],
    "fused_bias_gelu": ["bias_gelu", "exact_gelu_16_bit"],
    "fused_bias_swiglu": ["glu", "glu_float8"],
    "fused_cross_entropy": ["vocab_parallel_cross_entropy"],
    "fused_indices_converter": ["indices_to_multihot", "multihot_to_indices"],
    "fused_layer_norm": ["layer_norm", "rms_norm"],
    "fused_linear_cross_entropy": ["linear_cross_entropy"],
    "fused_mla_yarn_rope_apply": ["mla_rope_kv"],
    "fused_pad_routing_map": ["pad_routing_map"],
    "fused_permute": ["permute", "unpermute", "row_map"],
    "fused_quantize": ["quantize"],
    "fused_rope": ["rope"],
    "fused_softmax": ["masked_softmax"],
    "fused_topk_router": ["topk_router", "aux_loss_scores"],
    "fused_weighted_squared_relu": ["weighted_squared_relu"],
    "grouped_matmul": ["grouped_matmul"],
}


def newest() -> Path:
    """The newest CPU result."""
    return max((ROOT / "benchmarks" / "results").glob("fusions-cpu-*.json"))


def section(page: str, result: Path) -> str:
    """The section of ``page`` with the measurements."""
    kept = json.loads(result.read_text())
    runs = from_json(kept)
    rounds = max(len(figures.both) for figures in runs[0].contests[0].figures.values())
    wanted = [
        index for index, one in enumerate(runs[0].contests) if OPERATIONS[one.operation].fusion in FUSIONS_OF[page]
    ]
    command = f"python -m benchmarks.fusions --runs {len(runs)} --rounds {rounds}"
    return f"""{HEADING}

Speed-up over torch eager, forward / forward and backward [quartiles of the latter]: the best of {len(runs)} runs,
each the median of {rounds} interleaved rounds, on a CPU with {kept["machine"]["threads"]} threads, {kept["date"][:10]},
by `{command}`
([the whole table](../../benchmarks/results/{result.stem}.md)). On a GPU: [some figures](../benchmarks.md#on-a-gpu).

{NEWLINE.join(table(runs, NAMES, wanted))}
"""


def main() -> None:
    """Writes the section of every page."""
    for page in FUSIONS_OF:
        file = PAGES / f"{page}.md"
        text = file.read_text()
        head, _, _ = text.partition(HEADING)
        file.write_text(f"{head.rstrip()}\n\n{section(page, newest())}")


if __name__ == "__main__":
    main()
