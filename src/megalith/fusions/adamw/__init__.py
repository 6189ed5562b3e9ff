"""AdamW update of many tensors at once."""
