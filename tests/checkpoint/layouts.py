"""Tensors like those of a model and its optimizer, in any layout of a (replicate, shard, tp) mesh."""

import functools
import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# name: (shape, dtype, dimension that FSDP shards, dimension that tensor parallelism shards)
TENSORS = {
    "model.embed_tokens.weight": ((13, 8), torch.float32, 1, 0),  # a prime vocabulary
    "model.q_proj.weight": ((12, 8), torch.bfloat16, 1, 0),
    "model.o_proj.weight": ((8, 12), torch.float64, 0, 1),
    "model.gate_up.weight": ((2, 7, 8), torch.float16, 2, 1),
    "model.norm.weight": ((5,), torch.float32, 0, None),  # over 4 ranks: 2, 2, 1 and 0
    "model.scale": ((), torch.float64, None, None),
    "model.mask": ((3, 3), torch.bool, None, 0),
    "model.empty": ((0, 4), torch.float32, None, 1),
    "optimizer.exp_avg.model.norm.weight": ((5,), torch.float32, 0, None),
}
PLAIN = "optimizer.step"

Layout = tuple[int, int, int]
LAYOUTS: dict[int, list[Layout]] = {
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 4, 1), (1, 1, 4), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)],
}


def full_tensors(seed: int) -> dict[str, Tensor]:
    """The global tensors, random bits, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, dtype, _, _) in TENSORS.items():
        # arbitrary bits, including NaN: a checkpoint must not depend on values
        bits = torch.randint(256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tensors[name] = (bits & 1 if dtype == torch.bool else bits).view(dtype).reshape(shape)
    tensors[PLAIN] = torch.tensor(seed + 2**40)
    return tensors


@functools.cache
def mesh_of(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def in_layout(full: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The tensors of ``full`` as DTensors; plain tensors where TENSORS names no dimension."""
    tensors = {PLAIN: full[PLAIN].clone()}
    for name, (_, _, shard_dim, tp_dim) in TENSORS.items():
        placements = [Replicate(), *(Replicate() if dim is None else Shard(dim) for dim in (shard_dim, tp_dim))]
        # each rank slices its own part: nothing is sent, so no collective can change a bit
        tensors[name] = distribute_tensor(full[name], mesh_of(layout), placements, src_data_rank=None)
    return tensors


def local_bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """This rank's part of each tensor, as bytes."""
    parts = {name: getattr(tensor, "_local_tensor", tensor).contiguous() for name, tensor in tensors.items()}
    return {name: part.reshape(-1).view(torch.uint8).numpy().tobytes() for name, part in parts.items()}
