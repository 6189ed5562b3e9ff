"""Models of Hugging Face's transformers: their config.json and tensors read as ours, and ours written as theirs."""

from megalith.models.hf import gpt2, llama
from megalith.models.hf.folder import detect, read_folder
from megalith.models.hf.parameters import parameter_shapes

__all__ = ["detect", "gpt2", "llama", "parameter_shapes", "read_folder"]
