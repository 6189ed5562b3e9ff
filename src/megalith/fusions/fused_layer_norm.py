"""LayerNorm and RMSNorm for any hidden size: functions, and modules under the usual names."""

from megalith.fusions.norm.layer_norm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "fused_layer_norm", "fused_rms_norm"]
