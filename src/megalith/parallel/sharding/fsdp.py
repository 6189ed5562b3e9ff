"""FSDP2 with the house's rule of reduction: every gradient is a SUM, and nothing divides.

The loss is seeded with 1 / count, so a gradient is the sum of what each data-parallel rank computed; FSDP's own
averaging is switched off. Sums are formed in float32 or wider. With tp, FSDP shards the dimension that tp does not.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalith.errors import ShapeError
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["gradient_sync", "release_gathered_weights", "shard_model"]


def shard_model(
    model: nn.Module,
    units: Iterable[nn.Module],
    pg_collection: ProcessGroupCollection,
    *,
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shards ``model`` in place over its data-parallel mesh, each of ``units`` gathered on its own, then the rest.

    Args:
        compute_dtype: what forward and backward see.
        param_dtype: what the parameters, and the optimizer, are kept in.
        reshard_after_forward: free a unit's gathered weights after its forward (ZeRO-3) or keep them until its
            backward (ZeRO-2): one all-gather a micro-batch less, for the memory of the whole model.

    Raises:
        ShapeError: a parameter is tied between two units, which FSDP2 would part without a word.
    """
    num_parameters = len(list(model.parameters()))  # tied ones count once
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == param_dtype else compute_dtype,
        reduce_dtype=torch.promote_types(param_dtype, torch.float32),
        cast_forward_inputs=False,  # rotary tables stay in float32
    )
    for module in (*units, model):
        fully_shard(
            module,
            mesh=pg_collection.dp_mesh,
            mp_policy=policy,
            shard_placement_fn=_other_dimension,
            reshard_after_forward=reshard_after_forward and module is not model,
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


def gradient_sync(model: nn.Module, last: bool) -> None:
    """Says before a micro-batch whether its backward is the ``last`` of the step: only that one reduces gradients."""
    assert isinstance(model, FSDPModule), "gradient_sync needs a model that shard_model has sharded"
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def release_gathered_weights(model: nn.Module) -> None:
    """Frees weights that a forward without a backward has left gathered: parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _other_dimension(parameter: nn.Parameter) -> Shard | None:
    """The dimension that tp leaves whole; FSDP's own choice, dimension 0, where there is no other."""
    if isinstance(parameter, DTensor) and parameter.ndim > 1 and parameter.placements[0] == Shard(0):
        return Shard(1)
    return None
