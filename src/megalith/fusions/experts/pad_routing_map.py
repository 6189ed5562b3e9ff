"""Pads each expert's tokens to the alignment of low-precision matrix products: more of the routing map becomes one.

    n[e] = tokens routed to expert e;  r[e] = -n[e] mod pad_multiple
    padded[t, e] = 1 where routing_map[t, e] is zero and among the first r[e] zeros of column e, in token order

A padding token's weight stays zero, so the output of the layer is unaffected. A column with fewer than r zeros becomes
all ones, and its count no multiple; to raise would be to wait for the device. ``permute`` can pad without this map.

T tokens, E experts. No gradient. Floor: 2TE bytes of a bool map, 8TE of an int32 one.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.experts.pad_routing_map_formulas import blocked, reference

__all__ = ["FUSION", "fused_pad_routing_map"]


def fused_pad_routing_map(routing_map: Tensor, pad_multiple: int, *, backend: Backend | None = None) -> Tensor:
    """The map with enough more tokens that each expert gets a multiple of ``pad_multiple``, where T allows it.

    Args:
        routing_map: [T, E], bool or an integer dtype: what is not zero is routed.
        pad_multiple: tokens; 16 for most fp8 recipes, 32 for mxfp8 and nvfp4.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        A fresh tensor like ``routing_map``: shape, dtype and order of strides. Entries that were not zero stay.

    Raises:
        ConfigError: ``pad_multiple`` is not positive.
        ShapeError: ``routing_map`` is not a matrix of bool or integers.
        BackendError: ``backend`` cannot run on ``routing_map``.
    """
    if pad_multiple < 1:
        raise ConfigError(f"pad_multiple must be 1 or more tokens; got {pad_multiple}")
    if routing_map.is_floating_point() or routing_map.is_complex():
        raise ShapeError(f"routing_map must be bool or of integers; got {routing_map.dtype}")
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
