"""The global norm of the gradient, and clipping by it; the result is the same in every layout.

    norm = sqrt(sum over all elements of g^2),   g *= min(1, clip / (norm + 1e-6))

Each rank sums its own shards; an element held by several ranks is counted by the first of them. Pascanu et al. 2013,
arXiv:1211.5063; the 1e-6 is that of torch.nn.utils.clip_grad_norm_.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.errors import ShapeError

__all__ = ["clip_coefficient", "local_squared_norm", "scale_gradients_"]

_ROW = 4096  # elements that are summed in float32; of random ones, the norm is then exact to about 4e-9


def local_squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Returns this rank's contribution to the squared global norm, a float64 scalar; the SUM over ranks is norm^2.

    Raises:
        ShapeError: a gradient is partial: it has not been summed over ranks yet.
    """
    parameters = list(parameters)
    owned = [_local(p.grad) for p in parameters if p.grad is not None and _counts_here(p.grad)]
    shards = [gradient for gradient in owned if gradient.numel()]
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
    return _norms(shards).square().sum()


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """Returns the factor that scales gradients to a norm of at most ``clip_norm``; 0 disables clipping."""
    return min(clip_norm / (norm + 1e-6), 1.0) if clip_norm else 1.0  # in this order min keeps a NaN norm


def scale_gradients_(parameters: Iterable[nn.Parameter], coefficient: float) -> None:
    """Multiplies every gradient by ``coefficient``, in place."""
    shards = [_local(p.grad) for p in parameters if p.grad is not None]
    if shards and coefficient != 1.0:
        torch._foreach_mul_(shards, coefficient)


def _norms(shards: list[Tensor]) -> Tensor:
    """Returns the norms of parts that together make up ``shards``, in float64."""
    if shards[0].device.type != "cpu":
        return torch.stack([norm.double() for norm in torch._foreach_norm(shards)])
    # on a CPU torch adds up a float32 norm in a few float32 sums, which for 5e7 elements are 0.4 % short
    norms = []
    for shard in shards:
        flat = shard.reshape(-1)
        whole = flat.numel() // _ROW * _ROW
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double())
        norms.append(torch.linalg.vector_norm(flat[whole:]).double().view(1))
    return torch.cat(norms)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _counts_here(gradient: Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank only holds tensors of meshes that it belongs to"
    if any(placement.is_partial() for placement in gradient.placements):
        raise ShapeError(
            f"a gradient with placements {gradient.placements} must be reduced first; shard_model does it in backward"
        )
    return all(
        index == 0 for index, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate()
    )
