"""Runs on a given path of the fused operations; without it, the tests' small tensors would all take the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megalith.fusions.core import blocks
from megalith.fusions.core.dispatch import Backend, Fusion, use
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory

# path -> the dtype that it is tested in, and for each shape the operations that must be observed to take it
_ROWS = {
    "llama": {"add_norm", "rms_norm", "rope", "glu", "bias_dropout_add", "vocab_parallel_cross_entropy"},
    "gpt2": {"add_norm", "layer_norm", "bias_gelu", "bias_dropout_add", "vocab_parallel_cross_entropy"},
}
PATHS: dict[Backend, tuple[str, dict[str, set[str]]]] = {
    "blocked": ("float64", _ROWS),
    "compile": ("float32", _ROWS),
    "triton": ("float32", {**_ROWS, "llama": _ROWS["llama"] | {"attention"}}),  # attention dropout uses plain torch
}


@contextmanager
def taking(path: Backend) -> Iterator[set[str]]:
    """Operations that support ``path`` take it, in several blocks; yields the names of those that did."""
    taken: set[str] = set()
    choose = Fusion.choose

    def noting(self: Fusion[Any], x: Any) -> Backend:
        chosen = choose(self, x)
        if chosen == path:
            taken.add(self.name)
        return chosen

    with (
        use(path),
        patch.object(Fusion, "choose", noting),
        patch.object(blocks, "_THREAD_ELEMENTS", 64),
        patch.object(torch._inductor.config, "compile_threads", 1),  # no pool of compiler processes on each rank
    ):
        yield taken


def first_steps_on(path: Backend, tree: dict[str, Any], num_steps: int = 2) -> tuple[Trajectory, set[str]]:
    """Runs ``first_steps`` on ``path``; also returns the operations that took it."""
    with taking(path) as taken:
        return first_steps(tree, torch.distributed.get_world_size(), num_steps), taken
