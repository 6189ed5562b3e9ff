"""FSDP2 with gradients that are summed, never averaged.

The backward is seeded with weight / count, so the gradient is the plain sum over data-parallel ranks, and FSDP's own
averaging is switched off. Sums are computed in float32 or wider. With tp, FSDP shards a dimension that tp does not
split. Dense and expert weights are sharded over different meshes, chosen by the declarations in each unit.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalith.errors import ShapeError
from megalith.parallel.parameters import DeclaringModule
from megalith.topology.process_groups_config import Family, ProcessGroupCollection
from megalith.torch_compat.distributed import ReduceScatter, end_backward

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
    """Shards ``model`` in place over data-parallel meshes: each of ``units`` on its own, then everything else.

    Args:
        units: modules that are gathered separately, inner ones first. What a unit holds besides the units inside it
            must be of one family of weights, and is sharded over that family's mesh.
        compute_dtype: of the weights in forward and backward.
        param_dtype: of the parameters and the optimizer state.
        reshard_after_forward: free a unit's gathered weights after its forward (ZeRO-3), or keep them until its
            backward (ZeRO-2), which saves one all-gather per micro-batch at the cost of holding the whole model. The
            last unit's weights are kept in any case, because its backward comes first.

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
        sharded = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=partial(_other_dimension, num_shards=mesh.shape[-1]),
            reshard_after_forward=reshard_after_forward and module not in needed_at_once,
        )
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        if mesh.size() > 1:  # without a factor torch averages; with one, a single rank makes a copy and divides it by 1
            sharded.set_gradient_divide_factor(1.0)
        if mesh.shape[-1] == 1:
            sharded.set_custom_reduce_scatter(_InPlace())
        if not reshard_after_forward:
            # backward finds all weights gathered. torch would derive the prefetch from the latest forward, which in a
            # pipeline is that of another micro-batch, and gather a layer that has just been freed
            sharded.set_modules_to_backward_prefetch([sharded])
    if len(list(model.parameters())) != num_parameters:
        raise ShapeError(
            "a parameter is shared by two units that are sharded separately, and would no longer be tied; register it "
            "in one of them, and pass it to the other's forward"
        )


def gradient_sync(model: nn.Module, last: bool, *, keeps_weights: bool = False) -> None:
    """Sets whether the next backward is the ``last`` of the step; only the last one reduces gradients.

    ``keeps_weights``: weights stay gathered from the first forward of a step until the last backward.
    """
    assert isinstance(model, FSDPModule), "gradient_sync needs a model that shard_model has sharded"
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last or not keeps_weights)


def finish_backward(model: nn.Module) -> None:
    """Runs FSDP's end-of-backward work for gradients that were computed outside a backward of ``model``.

    Gradients are accumulated in the reduction dtype. ``gradient_sync`` determines whether they are reduced and whether
    weights are freed.
    """
    assert isinstance(model, FSDPModule), "finish_backward needs a model that shard_model has sharded"
    end_backward(model)


def sharded_dimension(shape: Sequence[int], split: Collection[int], num_shards: int) -> int:
    """Returns the dimension to shard: the last one that is not in ``split`` and is divisible by ``num_shards``.

    ``split`` are the dimensions that tp, ep or etp split. The last one is preferred because it is much larger than the
    first in a packed weight ([E, F, H], [G, .., H]). Returns 0 if nothing is split or no such dimension exists: only
    dimension 0 may have uneven parts (FSDP2) and be split twice.
    """
    left = [dim for dim, size in enumerate(shape) if dim not in split and size % num_shards == 0]
    return left[-1] if split and left else 0


def release_gathered_weights(model: nn.Module) -> None:
    """Frees the gathered weights left by a forward without a backward; parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _InPlace(ReduceScatter):
    """A reduce-scatter over one rank, whose result is its input: both get the same memory.

    FSDP2 allocates the input and then the output of each reduction. It would copy one to the other, which takes a pass
    over all gradients, and twice the memory. The memory becomes that of the gradients if ``param_dtype`` is the dtype
    of the reduction; otherwise FSDP2 casts a copy. With replicas it divides by the gradient's factor of 1, which is
    still a copy.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        found, self._input = self._input, None
        if found is None or list(found.shape) != [*size] or found.dtype != dtype:
            found = self._input = torch.empty(size, dtype=dtype, device=device)
        return found

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Does nothing: there is no other rank."""


def _family(model: nn.Module, unit: nn.Module, placed: set[nn.Module]) -> Family:
    """Returns the weight family of the modules of ``unit`` that are not in ``placed``, and adds them to ``placed``."""
    held = set(unit.modules()) - placed
    placed |= held
    declaring = (module for module in held if isinstance(module, DeclaringModule))
    families = {spec.family for module in declaring for spec in module.parameter_specs.values()}
    if len(families) > 1:
        name = next(name for name, module in model.named_modules() if module is unit)
        raise ShapeError(
            f"{name or 'the model'} holds both dense and expert weights, which are sharded over different ranks; "
            "pass the module that holds the expert weights as a unit before it"
        )
    return families.pop() if families else "dense"


def _other_dimension(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    if not isinstance(parameter, DTensor):
        return None
    degrees = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    split = {placement.dim for placement, degree in degrees if isinstance(placement, Shard) and degree > 1}
    return Shard(sharded_dimension(parameter.shape, split, num_shards))
