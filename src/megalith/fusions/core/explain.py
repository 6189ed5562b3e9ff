"""Reports which path each fused operation would take here, why, and which others are available."""

from typing import NamedTuple

import torch

from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.core.devices import is_hopper
from megalith.fusions.core.dispatch import chosen_by_use
from megalith.fusions.core.registry import FUSIONS

__all__ = ["explain"]


class _Asked(NamedTuple):
    """A stand-in for an operand, larger than one block; no tensor is allocated."""

    device: torch.device
    dtype: torch.dtype

    def numel(self) -> int:
        return LARGEST_WHOLE + 1


def explain(device: str | torch.device | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    """Returns a table with a row per operation: the path for ``device`` and ``dtype``, the reason, and the other paths.

    ``device`` defaults to "cuda" if available, else "cpu". Nothing is computed on it.
    """
    x = _Asked(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), dtype)
    rows = [("operation", "path", "because", "alternatives")]
    for _, fusion in sorted(FUSIONS.items()):
        preferred, chosen = chosen_by_use(), fusion.choose(x)
        because = "use(...)" if preferred == chosen else f"default for {x.device.type}"
        if preferred is not None and preferred != chosen:
            because += f"; {preferred!r} is not available: {fusion.why_not(preferred, x)}"
        if fusion.on_hopper and preferred is None and is_hopper(x.device):
            because += f"; {fusion.on_hopper}"
        if reason := fusion.why_not(chosen, x):
            because += f", but {reason}"
        others = [path for path in fusion.paths if path != chosen and not fusion.why_not(path, x)]
        rows.append((fusion.name, chosen, because, ", ".join(others)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
