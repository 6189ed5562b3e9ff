"""One AdamW update of many tensors."""
