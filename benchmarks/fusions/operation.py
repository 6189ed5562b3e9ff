"""A fused operation in the benchmark: how to call it and its peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions.cost import Cost
from megalith.fusions.core.registry import FUSIONS

__all__ = ["BASE", "WITHOUT_COMPILER", "Inputs", "Operation", "outputs_of"]

Inputs = dict[str, Any]
Call = Callable[..., Any]
BASE = "torch eager"  # the contender that speed-ups are relative to
WITHOUT_COMPILER = "Megalith, no compiler"


@dataclass(frozen=True)
class Operation:
    """One operation with one set of options.

    Args:
        name: name of the row.
        fusion: the operation's name in ``megalith.fusions.explain()``.
        inputs: (bytes of the largest tensor, dtype, device) -> arguments by name; floating-point tensors get gradients
            unless ``constant`` names them.
        ours: (**inputs, backend=...) -> results.
        eager: (**inputs) -> the same, in plain torch as a user would write it.
        peers: name -> a function that imports the peer, if it is installed, and returns its (**inputs) -> results.
        cost: (**inputs) -> bytes that must move.
        constant: inputs without a gradient.
        judged: whether its results are compared; not if they are random, or rounded in between.
        typed: whether its inputs have the requested dtype; if not, it is measured with one dtype only.
    """

    name: str
    fusion: str
    inputs: Callable[[int, torch.dtype, str], Inputs]
    ours: Call
    eager: Call
    cost: Callable[..., Cost] | None = None
    peers: Mapping[str, Callable[[], Call]] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    judged: bool = True
    typed: bool = True

    def make(self, num_bytes: int, dtype: torch.dtype, device: str) -> Inputs:
        """Fresh random inputs, with ``requires_grad`` set on those that get a gradient."""
        torch.manual_seed(0)
        made = self.inputs(num_bytes, dtype, device)
        for name, x in made.items():
            if isinstance(x, Tensor) and x.is_floating_point() and name not in self.constant:
                x.requires_grad_()
        return made

    def contenders(self, device: str) -> dict[str, Call]:
        """By name: ours by default and without a compiler, torch eager and compiled, and the installed peers."""
        found: dict[str, Call] = {"Megalith": lambda **inputs: self.ours(**inputs)}
        first, *others = FUSIONS[self.fusion].defaults[device]
        if first == "compile":
            found[WITHOUT_COMPILER] = lambda **inputs: self.ours(**inputs, backend=others[0])
        found |= {BASE: self.eager, "torch.compile": torch.compile(self.eager, dynamic=False)}
        for name, build in self.peers.items():
            try:
                found[name] = build()
            except ImportError:
                continue  # the table shows which peers are installed
        return found


def outputs_of(results: Any) -> list[Tensor]:
    """The results that have a gradient."""
    values = results if isinstance(results, tuple | list) else (results,)
    return [y for y in values if isinstance(y, Tensor) and y.requires_grad]
