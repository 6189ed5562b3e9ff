"""FSDP2 with the house's rule of reduction: every gradient is a SUM, and nothing divides.

The loss is seeded with 1 / count, so a gradient is the sum of what each data-parallel rank computed; FSDP's own
averaging is switched off. Sums are formed in float32 or wider. With tp, FSDP shards the dimension that tp does not.
Dense and expert weights are sharded over meshes of their own, which a unit's declarations choose.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalith.errors import ShapeError
from megalith.parallel.parameters import DeclaringModule
from megalith.topology.process_groups_config import Family, ProcessGroupCollection
from megalith.torch_compat import end_backward

__all__ = ["finish_backward", "gradient_sync", "release_gathered_weights", "shard_model", "sharded_dimension"]


def shard_model(
    model: nn.Module,
    units: Iterable[nn.Module],
    pg_collection: ProcessGroupCollection,
    *,
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shards ``model`` in place over data-parallel meshes, each of ``units`` gathered on its own, then the rest.

    Args:
        units: from the inside out; what a unit holds besides the units inside it is of one family of weights, and is
            sharded over that family's mesh.
        compute_dtype: what forward and backward see.
        param_dtype: what the parameters, and the optimizer, are kept in.
        reshard_after_forward: free a unit's gathered weights after its forward (ZeRO-3) or keep them until its
            backward (ZeRO-2): one all-gather a micro-batch less, for the memory of the whole model. Those of the last
            unit are kept anyway, because its backward is the first.

    Raises:
        ShapeError: a parameter is tied between two units, which FSDP2 would silently untie, or a unit holds dense
            and expert weights.
    """
    num_parameters = len(list(model.parameters()))  # tied ones count once
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == param_dtype else compute_dtype,
        reduce_dtype=torch.promote_types(param_dtype, torch.float32),
        cast_forward_inputs=False,  # rotary tables stay in float32
    )
    placed: set[nn.Module] = set()
    units = list(units)
    needed_at_once = (*units[-1:], model)
    for module in (*units, model):
        mesh = pg_collection.data_mesh(_family(model, module, placed))
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=partial(_other_dimension, num_shards=mesh.shape[-1]),
            reshard_after_forward=reshard_after_forward and module not in needed_at_once,
        )
    if len(list(model.parameters())) != num_parameters:
        raise ShapeError(
            "a parameter is registered in two of the units that are gathered on their own, and would become two; "
            "register it in one, and pass it to the other's forward"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            if not reshard_after_forward:
                # no weights are missing in backward; torch would take its prefetch from the latest forward, which in a
                # pipeline is that of another micro-batch, and gather a layer that has just been freed
                module.set_modules_to_backward_prefetch([module])


def gradient_sync(model: nn.Module, last: bool, *, keeps_weights: bool = False) -> None:
    """Says before a micro-batch whether its backward is the ``last`` of the step: only that one reduces gradients.

    ``keeps_weights``: weights stay gathered from the first forward of a step until that backward.
    """
    assert isinstance(model, FSDPModule), "gradient_sync needs a model that shard_model has sharded"
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or not keeps_weights)


def finish_backward(model: nn.Module) -> None:
    """Does for gradients that were computed apart from a backward of ``model`` what FSDP does at the end of one.

    They are added up in the dtype of the reduction; reduction and freed weights are as ``gradient_sync`` has said.
    """
    assert isinstance(model, FSDPModule), "finish_backward needs a model that shard_model has sharded"
    end_backward(model)


def sharded_dimension(shape: Sequence[int], split: Collection[int], num_shards: int) -> int:
    """The last dimension that tp, ep and etp leave whole and that ``num_shards`` divide, ``split`` being the others.

    The last, because a packed weight ([E, F, H], [G, .., H]) has many more of its elements than of its first. 0 where
    nothing is split, or no such dimension is left: only that one may have uneven parts (FSDP2), and be split twice.
    """
    left = [dim for dim, size in enumerate(shape) if dim not in split and size % num_shards == 0]
    return left[-1] if split and left else 0


def release_gathered_weights(model: nn.Module) -> None:
    """Frees weights that a forward without a backward has left gathered: parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _family(model: nn.Module, unit: nn.Module, placed: set[nn.Module]) -> Family:
    """The family of what ``unit`` holds besides the modules that are ``placed``, to which it adds its own."""
    held = set(unit.modules()) - placed
    placed |= held
    declaring = (module for module in held if isinstance(module, DeclaringModule))
    families = {spec.family for module in declaring for spec in module.parameter_specs.values()}
    if len(families) > 1:
        name = next(name for name, module in model.named_modules() if module is unit)
        raise ShapeError(
            f"{name or 'the model'} holds dense and expert weights, which are sharded over other ranks; "
            "give the module that holds the expert weights as a unit before it"
        )
    return families.pop() if families else "dense"


def _other_dimension(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    if not isinstance(parameter, DTensor):
        return None
    degrees = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    split = {placement.dim for placement, degree in degrees if isinstance(placement, Shard) and degree > 1}
    return Shard(sharded_dimension(parameter.shape, split, num_shards))
