"""Attention over grouped heads: a window, packed documents, a sink; its output and log-sum-exp."""

from megalith.fusions.attention.attention import attention_gradients, fused_attention, key_range

__all__ = ["attention_gradients", "fused_attention", "key_range"]
