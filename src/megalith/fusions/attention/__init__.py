"""Attention over grouped heads, with its log-sum-exp."""
