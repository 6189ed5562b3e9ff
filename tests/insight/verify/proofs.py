"""Proofs of tiny recipes, and runs with a fault in every rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megalith.config import load_run
from megalith.insight.verify import proof
from megalith.insight.verify.cover import cover, degrees_to_show
from megalith.insight.verify.proof import Case, Proof, Result, narrowed
from megalith.insight.verify.shrink import small_recipe
from tests.tiny_run import GPT2

__all__ = ["GPT2_RECIPE", "begin", "compare_with", "found_with"]

Fault = Callable[[], Any]

_compare = proof._compare

# tied weights, biases, dropout and learned positions: most mistakes affect one of them
GPT2_RECIPE: dict[str, Any] = {
    "model": {**GPT2, "num_attention_heads": 8, "num_layers": 4},
    "data": {"train": "nowhere", "seq_length": 64},
    "train": {"steps": 100, "global_batch_size": 64, "micro_batch_size": 2},
    "optim": {"lr": 1e-3, "clip_norm": 0.5},
    "run": "nowhere",
}


def begin(tree: dict[str, Any], world_size: int, folder: Path) -> Proof:
    """The proof of the recipe ``tree`` on ``num_ranks`` ranks."""
    config = load_run(tree, world_size=world_size)
    layout = config.parallel.layout(world_size)
    shown = degrees_to_show(config, layout)
    return Proof.begin(config, small_recipe(config, layout, shown, cover(shown)), folder)


def found_with(fault: Fault, prepared: Proof, case: Case) -> tuple[Result, Result]:
    """The result of ``case`` with ``fault`` injected in every rank, and of the smallest layout that shows it."""
    with patch.object(proof, "_compare", partial(compare_with, fault)):
        result = prepared.run(case)
        return result, result if result.same else narrowed(prepared, result)


def compare_with(fault: Fault, *arguments: Any) -> Any:
    """What a rank runs, with ``fault`` injected."""
    with fault():
        return _compare(*arguments)
