"""Reads GPT checkpoints of Megatron-Core (``torch_dist``) without executing anything in them."""

from megalith.models.megatron.folder import MegatronFolder, is_megatron_folder, open_megatron_folder

__all__ = ["MegatronFolder", "is_megatron_folder", "open_megatron_folder"]
