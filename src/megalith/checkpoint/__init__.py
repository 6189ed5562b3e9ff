"""Saves and loads tensors in any layout, together with JSON state. The format: docs/checkpoints.md."""

from megalith.checkpoint.background import BackgroundSaver
from megalith.checkpoint.folders import find_checkpoint, set_aside_damaged
from megalith.checkpoint.load import load_tensors, read_state
from megalith.checkpoint.save import save_checkpoint
from megalith.checkpoint.verify import verify_checkpoint

__all__ = [
    "BackgroundSaver",
    "find_checkpoint",
    "load_tensors",
    "read_state",
    "save_checkpoint",
    "set_aside_damaged",
    "verify_checkpoint",
]
