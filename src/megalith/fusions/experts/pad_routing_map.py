"""Pads each expert's token count to the alignment of low-precision matrix products by setting more of the map.

    n[e] = tokens routed to expert e;  r[e] = -n[e] mod pad_multiple
    padded[t, e] = 1 where routing_map[t, e] is zero and among the first r[e] zeros of column e, in token order

A padding token's weight stays zero, so the output of the layer is unaffected. A column with fewer than r zeros becomes
all ones without reaching a multiple; raising would cause a host sync. ``permute`` can pad without this map.

T tokens, E experts. No gradient. Lower bound: 2TE bytes for a bool map, 8TE for int32.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.experts.pad_routing_map_formulas import blocked, reference

__all__ = ["FUSION", "fused_pad_routing_map"]


def fused_pad_routing_map(routing_map: Tensor, pad_multiple: int, *, backend: Backend | None = None) -> Tensor:
    """Returns the map with tokens added so that each expert gets a multiple of ``pad_multiple``, if T allows it.

    Args:
        routing_map: [T, E], bool or an integer dtype; nonzero means routed.
        pad_multiple: tokens; 16 for most fp8 recipes, 32 for mxfp8 and nvfp4.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        A new tensor with the shape, dtype and stride order of ``routing_map``. Nonzero entries are kept.

    Raises:
        ConfigError: ``pad_multiple`` is not positive.
        ShapeError: ``routing_map`` is not a matrix of bool or integers.
        BackendError: ``backend`` cannot run on ``routing_map``.
    """
    if pad_multiple < 1:
        raise ConfigError(f"pad_multiple must be 1 or more tokens; got {pad_multiple}")
    if routing_map.is_floating_point() or routing_map.is_complex():
        raise ShapeError(f"routing_map must be bool or an integer dtype; got {routing_map.dtype}")
    if routing_map.dim() != 2:
        raise ShapeError(f"routing_map must be [T, E], a row for each token; got {list(routing_map.shape)}")
    return FUSION.path(routing_map, backend)(routing_map, pad_multiple)


def _triton(routing_map: Tensor, pad_multiple: int) -> Tensor:
    from megalith.fusions.experts.kernels.pad_routing_map import op

    return op(routing_map, pad_multiple)


_PATHS: Mapping[Backend, Callable[[Tensor, int], Tensor]] = {
    "triton": _triton,
    "compile": compiled(reference),
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("pad_routing_map", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))
