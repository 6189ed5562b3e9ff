"""Parameters that say where they live and how they begin.

A layer declares each parameter once: its shape before any split, the tensor dimension that tp shards, its first values.
Initialisation, sharding, norms, weight decay and checkpoints all follow from that declaration; nothing is pinned on
tensors. A parameter with tp > 1 is a DTensor on the tp mesh; FSDP2 later adds the data-parallel axes to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megalith.errors import ShapeError
from megalith.numerics.initialization import normal_shard
from megalith.parallel.boxes import local_box, split_evenly
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["DeclaringModule", "ParameterSpec", "declared_parameters", "initialize_parameters_", "local"]


@dataclass(frozen=True)
class ParameterSpec:
    """How one parameter is split over tp (``tp_dim``; None: every rank has all of it) and what it begins as."""

    shape: tuple[int, ...]
    tp_dim: int | None
    init: Literal["normal", "zeros", "ones"]
    std: float = 0.0


class DeclaringModule(nn.Module):
    """An ``nn.Module`` that declares its parameters; one registered otherwise is refused when the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter_specs: dict[str, ParameterSpec] = {}

    def declare(
        self, name: str, spec: ParameterSpec, pg_collection: ProcessGroupCollection, dtype: torch.dtype
    ) -> None:
        """Registers parameter ``name``, empty, on torch's current default device."""
        self.parameter_specs[name] = spec
        if pg_collection.tp_size == 1:
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, dtype=dtype)))
            return
        local_shape = list(spec.shape)
        placement: Placement = Replicate()
        if spec.tp_dim is not None:
            start, stop = split_evenly(spec.shape[spec.tp_dim], pg_collection.tp_size, pg_collection.tp_rank)
            local_shape[spec.tp_dim] = stop - start
            placement = Shard(spec.tp_dim)
        whole = torch.empty(spec.shape, dtype=dtype, device="meta")
        tensor = DTensor.from_local(
            torch.empty(local_shape, dtype=dtype),
            pg_collection.tp_mesh,
            [placement],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        self.register_parameter(name, nn.Parameter(tensor))


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """This rank's part of ``parameter``, for use in a forward.

    ``partial=True`` says that the use sees some of the tokens only, so that the gradient here is one term of a sum over
    tp: sequence-parallel norms and biases. FSDP2 settles the sum when it reduces.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if partial else list(parameter.placements))


def declared_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    """(canonical name, parameter, declaration) of every parameter once, tied ones under their first name.

    Raises:
        ShapeError: a parameter was registered without a declaration.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            spec = module.parameter_specs.get(name) if isinstance(module, DeclaringModule) else None
            if spec is None:
                raise ShapeError(
                    f"parameter {full_name} has no placement; register it with DeclaringModule.declare(name, spec, ...)"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield full_name, parameter, spec


@torch.no_grad()
def initialize_parameters_(model: nn.Module, seed: int) -> None:
    """Fills this rank's part of every parameter; a value depends on (seed, name, global element index) alone."""
    for name, parameter, spec in declared_parameters(model):
        values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if spec.init == "normal":
            box = local_box(parameter)
            sizes = tuple(stop - start for start, stop in box)
            offsets = tuple(start for start, _ in box)
            drawn = normal_shard(
                seed, name, spec.shape, offsets, sizes, spec.std, dtype=values.dtype, device=values.device
            )
            values.copy_(drawn)
        else:
            values.fill_(1.0 if spec.init == "ones" else 0.0)
