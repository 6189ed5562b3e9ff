"""Says which path each fused operation would take here, why, and which others it could take."""

from typing import NamedTuple

import torch

from megalith.fusions.aux_loss_scores import FUSION as AUX_LOSS_SCORES
from megalith.fusions.fused_adamw import FUSION as ADAMW
from megalith.fusions.fused_add_norm import FUSION as ADD_NORM
from megalith.fusions.fused_attention import FUSION as ATTENTION
from megalith.fusions.fused_bias_dropout import FUSION as BIAS_DROPOUT
from megalith.fusions.fused_bias_gelu import FUSION as BIAS_GELU
from megalith.fusions.fused_cross_entropy import FUSION as CROSS_ENTROPY
from megalith.fusions.fused_indices_converter import INDICES_TO_MULTIHOT_FUSION, MULTIHOT_TO_INDICES_FUSION
from megalith.fusions.fused_layer_norm import LAYER_NORM_FUSION, RMS_NORM_FUSION
from megalith.fusions.fused_linear_cross_entropy import FUSION as LINEAR_CROSS_ENTROPY
from megalith.fusions.fused_mla_yarn_rope_apply import FUSION as MLA_YARN_ROPE_APPLY
from megalith.fusions.fused_pad_routing_map import FUSION as PAD_ROUTING_MAP
from megalith.fusions.fused_permute import PERMUTE_FUSION, UNPERMUTE_FUSION
from megalith.fusions.fused_quantize import FUSION as QUANTIZE
from megalith.fusions.fused_rope import FUSION as ROPE
from megalith.fusions.fused_topk_router import FUSION as TOPK_ROUTER
from megalith.fusions.fused_weighted_squared_relu import FUSION as WEIGHTED_SQUARED_RELU
from megalith.fusions.glu import FUSION as GLU
from megalith.fusions.glu_float8 import FUSION as GLU_FLOAT8
from megalith.fusions.grouped_matmul import FUSION as GROUPED_MATMUL
from megalith.fusions.paths.backend import Fusion, chosen_by_use
from megalith.fusions.paths.blocks import LARGEST_WHOLE
from megalith.fusions.row_map import FUSION as ROW_MAP
from megalith.fusions.softmax import FUSION as SOFTMAX

__all__ = ["FUSIONS", "explain"]

FUSIONS: tuple[Fusion[object], ...] = (
    ADAMW,
    ADD_NORM,
    ATTENTION,
    BIAS_DROPOUT,
    BIAS_GELU,
    GLU,
    GLU_FLOAT8,
    SOFTMAX,
    ROPE,
    MLA_YARN_ROPE_APPLY,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    INDICES_TO_MULTIHOT_FUSION,
    MULTIHOT_TO_INDICES_FUSION,
    LAYER_NORM_FUSION,
    RMS_NORM_FUSION,
    PAD_ROUTING_MAP,
    QUANTIZE,
    PERMUTE_FUSION,
    UNPERMUTE_FUSION,
    ROW_MAP,
    GROUPED_MATMUL,
    TOPK_ROUTER,
    AUX_LOSS_SCORES,
    WEIGHTED_SQUARED_RELU,
)


class _Asked(NamedTuple):
    """The operand that is asked about: larger than a block, and no tensor of it is made."""

    device: torch.device
    dtype: torch.dtype

    def numel(self) -> int:
        return LARGEST_WHOLE + 1


def explain(device: str | torch.device | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    """A table with a row for each operation: the path for tensors of ``device`` and ``dtype``, why, and the others.

    ``device`` is by default "cuda" where there is one, else "cpu". Nothing is computed on it.
    """
    x = _Asked(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), dtype)
    rows = [("operation", "path", "because", "could also take")]
    for fusion in sorted(FUSIONS, key=lambda fusion: fusion.name):
        preferred, chosen = chosen_by_use(), fusion.choose(x)
        because = "use(...)" if preferred == chosen else f"the table for {x.device.type}"
        if preferred is not None and preferred != chosen:
            because += f"; it cannot take {preferred!r}: {fusion.why_not(preferred, x)}"
        if reason := fusion.why_not(chosen, x):
            because += f", but {reason}"
        others = [path for path in fusion.paths if path != chosen and not fusion.why_not(path, x)]
        rows.append((fusion.name, chosen, because, ", ".join(others)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
