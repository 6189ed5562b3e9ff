"""One ``.safetensors`` file: written here in one pass that also hashes it, read by the safetensors library.

The library's own writer wants all tensors on the CPU at once and gives no hash; ours holds one tensor at a time.
Format (huggingface.co/docs/safetensors, "Format"): 8 bytes N, unsigned little-endian; N bytes of JSON, which begins
with "{" and may end in spaces, {key: {"dtype", "shape", "data_offsets": [begin, end) after the header}}; then the
elements, row-major, little-endian, without holes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.box import Box
from megalith.errors import CheckpointError
from megalith.storage import FileRecord, explained

__all__ = ["DTYPES", "read_part", "write_shard"]

# torch's name of each dtype that a checkpoint may hold -> the format's name
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes ``tensors`` (any device, any strides) by their keys, and fsyncs. Raises StorageError."""
    # wide elements first, so that each tensor begins at a multiple of its element size
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header = _header({key: tensors[key] for key in keys})
    sha256, num_bytes = hashlib.sha256(header), len(header)
    with explained("write", path), path.open("wb") as file:
        file.write(header)
        for key in keys:
            content = tensors[key].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(content)
            sha256.update(content)
            num_bytes += len(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(num_bytes, sha256.hexdigest())


def read_part(file: Any, key: str, box: Box, part: Box, dtype: str) -> Tensor:
    """``part`` of the stored ``box`` under ``key``, on the CPU; only the pages of that part are read.

    Args:
        file: an open ``safetensors.safe_open(..., framework="pt")``.

    Raises:
        CheckpointError: what is stored is not a ``box`` of ``dtype`` (torch's name).
    """
    stored = file.get_slice(key)
    found, wanted = (stored.get_dtype(), stored.get_shape()), (DTYPES[dtype], list(box.shape))
    if found != wanted:
        raise CheckpointError(f"{key} must be {wanted[0]} {wanted[1]} by the index; the file has {found[0]} {found[1]}")
    content: Tensor = stored[part.slices_in(box)]
    return content


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The length field and the JSON, padded to a multiple of 8 bytes."""
    # transformers refuses files that do not say which framework wrote them
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
