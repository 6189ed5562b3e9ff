"""LayerNorm and RMSNorm of any hidden size: functions, and modules under the names that the field knows."""

from megalith.fusions.norm.layer_norm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "fused_layer_norm", "fused_rms_norm"]
