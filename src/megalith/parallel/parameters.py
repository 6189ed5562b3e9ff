"""Declared parameters: shape, split and initial values.

A layer declares each parameter once: its shape before any split, which axis shards which dimension, and its initial
values. Initialization, sharding, norms, weight decay and checkpoints all follow from that declaration; no attributes
are set on tensors. A parameter of a split model is a DTensor on its family's mesh; FSDP2 later adds the data-parallel
axes. Buffers are declared too: an undeclared one would hold garbage once a model built on meta is allocated.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megalith.errors import ShapeError
from megalith.numerics.initialization import normal_shard
from megalith.parallel.local_ranges import chunk_range, local_ranges
from megalith.topology.process_groups_config import WEIGHT_AXES, Family, ProcessGroupCollection

__all__ = [
    "BufferSpec",
    "DeclaringModule",
    "ParameterSpec",
    "declared_buffers",
    "declared_parameters",
    "initialize_parameters_",
    "local",
    "refill_buffers_",
    "state_tensors",
]


@dataclass(frozen=True)
class ParameterSpec:
    """The shape of a parameter before any split, how axes split it, and its initial values.

    Attributes:
        shape: of the whole parameter.
        init: initial values; ``std`` is the standard deviation of "normal".
        split: maps each axis that splits the parameter to the dimension that it splits, as by torch.chunk:
            ``{"tp": 0}``. The parameter is replicated over all other axes.
        family: "dense" weights are split over tp, "expert" weights over ep and etp. Each family has its own
            data-parallel ranks, over which it is replicated and sharded.

    Raises:
        ShapeError: an axis over which the family is not split, or a dimension that the shape does not have.
    """

    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0
    split: Mapping[str, int] = field(default_factory=dict)
    family: Family = "dense"

    def __post_init__(self) -> None:
        axes = WEIGHT_AXES[self.family]
        for axis, dim in self.split.items():
            if axis not in axes or not 0 <= dim < len(self.shape):
                raise ShapeError(
                    f"split must map an axis of {self.family} weights ({', '.join(axes)}) to a dimension of "
                    f"{list(self.shape)}; got {axis!r}: {dim}"
                )


@dataclass(frozen=True)
class BufferSpec:
    """How a buffer is made, on torch's current default device, and whether checkpoints contain it."""

    make: Callable[[], Tensor]
    saved: bool


class DeclaringModule(nn.Module):
    """An ``nn.Module`` that declares its parameters and buffers.

    ``parameter_specs`` and ``buffer_specs`` hold the declarations by name. Parameters and buffers that are registered
    in any other way raise an error once ``declared_parameters`` or ``declared_buffers`` finds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameter_specs: dict[str, ParameterSpec] = {}
        self.buffer_specs: dict[str, BufferSpec] = {}

    def declare(
        self, name: str, spec: ParameterSpec, pg_collection: ProcessGroupCollection, dtype: torch.dtype
    ) -> None:
        """Registers parameter ``name``, uninitialized, on torch's current default device."""
        self.parameter_specs[name] = spec
        axes = WEIGHT_AXES[spec.family]
        if all(pg_collection.size(axis) == 1 for axis in axes):
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, dtype=dtype)))
            return
        local_shape = list(spec.shape)
        placements: list[Placement] = []
        for axis in axes:
            dim = spec.split.get(axis)
            placements.append(Replicate() if dim is None else Shard(dim))
            if dim is not None:
                start, stop = chunk_range(local_shape[dim], pg_collection.size(axis), pg_collection.rank(axis))
                local_shape[dim] = stop - start
        whole = torch.empty(spec.shape, dtype=dtype, device="meta")
        tensor = DTensor.from_local(
            torch.empty(local_shape, dtype=dtype),
            pg_collection.weight_mesh(spec.family),
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        self.register_parameter(name, nn.Parameter(tensor))

    def declare_buffer(self, name: str, make: Callable[[], Tensor], *, saved: bool = False) -> None:
        """Registers ``make()`` as buffer ``name``, on torch's current default device, the same on all ranks.

        ``make`` is called again when a model built on meta is allocated. ``saved``: the buffer changes during training,
        and checkpoints contain it under its canonical name.
        """
        self.buffer_specs[name] = BufferSpec(make, saved)
        self.register_buffer(name, make(), persistent=saved)


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """Returns this rank's part of ``parameter``, for use in a forward.

    ``partial=True``: the weight is applied to part of the tokens only (sequence-parallel norms and biases), so the
    gradient on this rank is one term of a sum over the axes of its mesh. FSDP2's reduction includes that sum, in
    float32 or wider.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[_WideSum()] if partial else list(parameter.placements))


def declared_parameters(*models: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """Yields (canonical name, parameter, declaration) for every parameter once, tied ones under their first name.

    Several ``models`` are the chunks of one pipelined model and share one namespace. A name that an earlier chunk also
    has belongs to a declared copy of that parameter (``build_pipeline`` rejects any other), and is skipped.

    Raises:
        ShapeError: a parameter was registered without a declaration.
    """
    seen: set[int | str] = set()
    for path, module in _modules(models):
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            spec = module.parameter_specs.get(name) if isinstance(module, DeclaringModule) else None
            if spec is None:
                raise ShapeError(
                    f"parameter {full_name} is not declared; register it with DeclaringModule.declare(name, spec, ...)"
                )
            if seen.isdisjoint((id(parameter), full_name)):
                seen |= {id(parameter), full_name}
                yield full_name, parameter, spec


def declared_buffers(*models: nn.Module) -> Iterator[tuple[str, Tensor, BufferSpec]]:
    """Yields (canonical name, buffer, declaration) for every buffer. Raises ShapeError for an undeclared buffer."""
    for path, module in _modules(models):
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}" if path else name
            spec = module.buffer_specs.get(name) if isinstance(module, DeclaringModule) else None
            if spec is None:
                raise ShapeError(
                    f"buffer {full_name} is not declared and would stay uninitialized after a build on meta; register "
                    "it with DeclaringModule.declare_buffer(name, make)"
                )
            yield full_name, buffer, spec


def state_tensors(*models: nn.Module) -> dict[str, Tensor]:
    """Returns what a checkpoint contains, by canonical name: every parameter, tied ones once, and saved buffers."""
    buffers = {name: buffer for name, buffer, spec in declared_buffers(*models) if spec.saved}
    return {name: parameter for name, parameter, _ in declared_parameters(*models)} | buffers


@torch.no_grad()
def initialize_parameters_(model: nn.Module, seed: int) -> None:
    """Fills this rank's part of every parameter; a value depends only on (seed, name, global element index)."""
    for name, parameter, spec in declared_parameters(model):
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if spec.init == "normal":
            ranges = local_ranges(parameter)
            sizes = tuple(stop - start for start, stop in ranges)
            offsets = tuple(start for start, _ in ranges)
            drawn = normal_shard(
                seed, name, spec.shape, offsets, sizes, spec.std, dtype=values.dtype, device=values.device
            )
            values.copy_(drawn)
        else:
            values.fill_(1.0 if spec.init == "ones" else 0.0)


@torch.no_grad()
def refill_buffers_(model: nn.Module) -> None:
    """Resets every buffer, in place, to the values of its declaration."""
    for _, buffer, spec in declared_buffers(model):
        with torch.device(buffer.device):
            buffer.copy_(spec.make())


class _WideSum(Partial):
    """A ``Partial`` that is summed over ranks in float32 or wider; torch sums in the dtype of the terms."""

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        terms = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return super()._reduce_value(terms, mesh, mesh_dim).to(tensor.dtype)


def _modules(models: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    return (named for model in models for named in model.named_modules())
