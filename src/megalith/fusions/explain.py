"""Says which path each fused operation would take here, why, and which others it could take."""

from typing import NamedTuple

import torch

from megalith.fusions import (
    aux_loss_scores,
    fused_adamw,
    fused_add_norm,
    fused_attention,
    fused_bias_dropout,
    fused_bias_gelu,
    fused_cross_entropy,
    fused_indices_converter,
    fused_layer_norm,
    fused_linear_cross_entropy,
    fused_mla_yarn_rope_apply,
    fused_pad_routing_map,
    fused_permute,
    fused_quantize,
    fused_rope,
    fused_topk_router,
    fused_weighted_squared_relu,
    glu,
    glu_float8,
    row_map,
    softmax,
)
from megalith.fusions.backend import Fusion, chosen_by_use
from megalith.fusions.blocks import BLOCK_ELEMENTS

__all__ = ["FUSIONS", "explain"]

FUSIONS: tuple[Fusion[object], ...] = (
    fused_adamw.FUSION,
    fused_add_norm.FUSION,
    fused_attention.FUSION,
    fused_bias_dropout.FUSION,
    fused_bias_gelu.FUSION,
    glu.FUSION,
    glu_float8.FUSION,
    softmax.FUSION,
    fused_rope.FUSION,
    fused_mla_yarn_rope_apply.FUSION,
    fused_cross_entropy.FUSION,
    fused_linear_cross_entropy.FUSION,
    fused_indices_converter.INDICES_TO_MULTIHOT_FUSION,
    fused_indices_converter.MULTIHOT_TO_INDICES_FUSION,
    fused_layer_norm.LAYER_NORM_FUSION,
    fused_layer_norm.RMS_NORM_FUSION,
    fused_pad_routing_map.FUSION,
    fused_quantize.FUSION,
    fused_permute.PERMUTE_FUSION,
    fused_permute.UNPERMUTE_FUSION,
    row_map.FUSION,
    fused_topk_router.FUSION,
    aux_loss_scores.FUSION,
    fused_weighted_squared_relu.FUSION,
)


class _Asked(NamedTuple):
    """The operand that is asked about: larger than a block, and no tensor of it is made."""

    device: torch.device
    dtype: torch.dtype

    def numel(self) -> int:
        return BLOCK_ELEMENTS + 1


def explain(device: str | torch.device | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    """A table with a row for each operation: the path for tensors of ``device`` and ``dtype``, why, and the others.

    ``device`` is by default "cuda" where there is one, else "cpu". Nothing is computed on it.
    """
    x = _Asked(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), dtype)
    rows = [("operation", "path", "because", "could also take")]
    for fusion in sorted(FUSIONS, key=lambda fusion: fusion.name):
        chosen = chosen_by_use() or fusion.default(x)
        because = "use(...)" if chosen_by_use() else f"the table for {x.device.type}"
        if reason := fusion.why_not(chosen, x):
            because += f", but {reason}"
        others = [path for path in fusion.paths if path != chosen and not fusion.why_not(path, x)]
        rows.append((fusion.name, chosen, because, ", ".join(others)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
