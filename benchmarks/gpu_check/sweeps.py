"""Sweeps over block sizes, warps and grids of the kernels; each setting is checked and timed."""

import importlib
from typing import Any, NamedTuple

import torch

from benchmarks.fusions.operation import BASE
from benchmarks.fusions.timing import timed
from benchmarks.gpu_check.attention import SHAPES, TINY, attention
from benchmarks.restartable import Item, Line
from megalith import fusions
from megalith.fusions.core.devices import has_large_memory

__all__ = ["SWEEPS", "Setting", "Sweep", "items", "kernels_timed", "swept"]

_ROUNDS = 3
_FUSIONS = "megalith.fusions"


class Setting(NamedTuple):
    """A new value for a constant of a kernel module, or for the entry ``key`` of a constant that is a dict."""

    module: str
    name: str
    value: Any
    key: tuple[int, ...] | None = None


class Sweep(NamedTuple):
    """The operations to time (from ``benchmarks.fusions``, or attention shapes), and the settings to try."""

    operations: tuple[str, ...]
    settings: tuple[tuple[Setting, ...], ...]


def _each(module: str, name: str, values: tuple[Any, ...], key: tuple[int, ...] | None = None) -> list[Setting]:
    return [Setting(f"{_FUSIONS}.{module}", name, value, key) for value in values]


def _alone(*settings: list[Setting]) -> tuple[tuple[Setting, ...], ...]:
    return tuple((one,) for several in settings for one in several)


def _pairs(first: list[Setting], second: list[Setting]) -> tuple[tuple[Setting, ...], ...]:
    return tuple((one, other) for one in first for other in second)


_ATTENTION, _ATTENTION_BACK = "attention.kernels.attention", "attention.kernels.attention_backward"
_CE = "cross_entropy.kernels.cross_entropy"
_TILES = ("core.kernels.activations", "_WIDEST_TILE")
SWEEPS = {
    "cross entropy": Sweep(
        ("cross entropy",),
        _pairs(_each(_CE, "_BLOCK_V", (2048, 4096, 8192)), _each(_CE, "_WARPS", (4, 8)))
        + _pairs(_each(_CE, "_TILE_V", (2048, 4096, 8192)), _each(_CE, "_TILE_WARPS", (4, 8)))
        + _alone(_each(_CE, "_PROGRAMS", (1320,))),
    ),
    "softmax": Sweep(
        ("scale + causal + softmax",),
        _pairs(
            _each("softmax.formulas", "_ELEMENTS", (2048, 4096, 8192)),
            _each("softmax.kernels.softmax", "_OF_WARP", (256, 512, 1024)),
        ),
    ),
    "attention": Sweep(
        ("D 128",),
        _alone(
            _each(
                _ATTENTION,
                "_LARGE_BLOCKS",
                ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3)),
                (2, 128),
            ),
            _each(_ATTENTION_BACK, "_LARGE_KEYS_BLOCKS", ((32, 64, 8, 2), (32, 128, 8, 1), (32, 128, 8, 2)), (2, 128)),
            _each(
                _ATTENTION_BACK,
                "_LARGE_QUERIES_BLOCKS",
                ((64, 64, 4, 2), (128, 64, 8, 1), (128, 64, 8, 2), (128, 32, 8, 3)),
                (2, 128),
            ),
        ),
    ),
    "attention of narrow heads": Sweep(
        ("D 64",),
        _alone(
            _each(
                _ATTENTION,
                "_LARGE_BLOCKS",
                ((128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3)),
                (2, 64),
            ),
            _each(
                _ATTENTION_BACK,
                "_LARGE_KEYS_BLOCKS",
                ((32, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 8, 2), (64, 128, 8, 1), (64, 128, 8, 2)),
                (2, 64),
            ),
            _each(
                _ATTENTION_BACK,
                "_LARGE_QUERIES_BLOCKS",
                ((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (128, 64, 4, 2)),
                (2, 64),
            ),
        ),
    ),
    "attention of wide heads": Sweep(
        ("MLA, D 192 and 128", "D 256"),
        _alone(
            _each(_ATTENTION, "_LARGE_BLOCKS", ((128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)), (2, 256)),
            _each(_ATTENTION_BACK, "_LARGE_KEYS_BLOCKS", ((32, 64, 8, 1), (16, 64, 8, 1)), (2, 256)),
            _each(_ATTENTION_BACK, "_LARGE_QUERIES_BLOCKS", ((64, 32, 8, 1), (64, 64, 8, 1), (64, 32, 4, 2)), (2, 256)),
        ),
    ),
    "norm": Sweep(
        ("rms norm", "residual + rms norm"),
        _pairs(
            _each("norm.kernels.add_norm", "_LARGE_PROGRAMS", (132, 264, 396, 512)),
            _each("norm.kernels.add_norm", "_OF_THREAD", (8, 16)),
        )
        + _pairs(
            _each("norm.kernels.add_norm", "_LARGE_PROGRAMS", (264,)),
            _each("norm.kernels.add_norm", "_LARGE_STAGES", (1, 2)),
        ),
    ),
    "rows loaded ahead": Sweep(("swiglu, bias",), _alone(_each("gated.kernels.glu", "_STAGES", (2, 3)))),
    "sums over rows": Sweep(
        ("swiglu, bias", "bias gelu", "bias + residual, no dropout"),
        _pairs(_each("core.rows", "_PROGRAMS", (792, 1584, 2112)), _each(*_TILES, (512, 1024, 2048))),
    ),
    "routing": Sweep(
        ("row map", "pad routing map"),
        _pairs(
            _each("experts.kernels.row_map", "_CHUNK", (8, 32, 64)),
            _each("experts.kernels.pad_routing_map", "_CHUNK", (8,)),
        )
        + _alone(_each("experts.kernels.pad_routing_map", "_CHUNK", (32, 64))),
    ),
    "rope": Sweep(
        ("rope",),
        _pairs(_each("rope.kernels.rope", "_TILE", (2048, 4096)), _each("rope.kernels.rope", "_WARPS", (2, 4))),
    ),
}


def items(tiny: bool) -> list[Item]:
    """Arguments of ``swept``; tiny: the last setting of each sweep."""
    num_bytes, device = (1 << 12, "cpu") if tiny else (256 << 20, "cuda")
    return [
        Item(
            f"{operation}: {_words(settings)}", (operation, [list(one) for one in settings], num_bytes, device, _ROUNDS)
        )
        for sweep in SWEEPS.values()
        for settings in (sweep.settings[-1:] if tiny else sweep.settings)
        for operation in (sweep.operations[:1] if tiny else sweep.operations)
    ]


def swept(operation: str, settings: list[Any], num_bytes: int, device: str, rounds: int) -> Line:
    """Times ``operation`` under ``settings``, and restores the previous values."""
    applied = [Setting(*one) for one in settings]
    idle = [one.name for one in applied if one.name.startswith("_LARGE")]
    if idle and device == "cuda" and not has_large_memory(torch.zeros(1, device=device)):
        return {"skipped": f"this GPU does not use {', '.join(idle)}"}
    before = [getattr(importlib.import_module(one.module), one.name) for one in applied]
    try:
        for one in applied:
            _apply(one)
        if operation in SHAPES:
            heads = TINY if device == "cpu" else SHAPES[operation]
            return attention("Megalith", tuple(heads), device)
        return kernels_timed(operation, num_bytes, device, rounds)
    finally:
        for one, value in zip(applied, before, strict=True):
            setattr(importlib.import_module(one.module), one.name, value)


def kernels_timed(operation: str, num_bytes: int, device: str, rounds: int) -> Line:
    """``timed`` for our kernels and torch eager only: in bfloat16 on a GPU; one round in float32 in the interpreter."""
    contenders = ("Megalith", BASE)
    with fusions.use("triton"):
        if device == "cuda":
            return timed(operation, num_bytes, "bfloat16", device, rounds, contenders)
        return timed(operation, num_bytes, "float32", device, 1, contenders, sample=0.0)


def _apply(setting: Setting) -> None:
    module = importlib.import_module(setting.module)
    value = getattr(module, setting.name)
    if setting.key is not None:
        key = tuple(setting.key)
        (kind, *_) = map(type, value.values())
        value = value | {key: kind(*setting.value)}
    else:
        value = setting.value
    setattr(module, setting.name, value)


def _words(settings: tuple[Setting, ...]) -> str:
    return ", ".join(f"{one.module.rpartition('.')[2]}.{one.name} {one.value}" for one in settings)
