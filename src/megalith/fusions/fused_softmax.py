"""Softmax of attention scores under the usual names, all computed by ``masked_softmax``."""

from megalith.fusions.softmax.scale_mask_softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

__all__ = [
    "AttnMaskType",
    "FusedScaleMaskSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
]
