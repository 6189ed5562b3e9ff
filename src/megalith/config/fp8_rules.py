"""Rules on products in 8 bits: what torch can multiply, whole blocks of 128 numbers on every rank, some layers left."""

from collections.abc import Iterator
from typing import NamedTuple

from megalith.config.draft import Draft, Fix, Violation, divisors, round_up

__all__ = [
    "fp8_leaves_layers",
    "fp8_sequences_are_whole_blocks",
    "fp8_sizes_are_aligned",
    "fp8_splits_no_block",
]

_BLOCK, _ALIGNMENT = 128, 16
_FP8, _WGRAD = "precision.fp8.recipe", "precision.fp8.wgrad"
_START, _END = "precision.fp8.num_layers_at_start_in_bf16", "precision.fp8.num_layers_at_end_in_bf16"
_TENSOR, _CONTEXT, _SEQUENCE = "parallel.tensor", "parallel.context", "parallel.sequence"
_LENGTH, _LAYERS, _DECODER = "data.seq_length", "model.num_layers", "model.t5.num_decoder_layers"
_HEADS, _GROUPS, _HEAD = "model.num_attention_heads", "model.num_query_groups", "model.kv_channels"
_LATENT, _ROTATED, _VALUE = "model.mla.kv_lora_rank", "model.mla.qk_rope_head_dim", "model.mla.v_head_dim"
_NOPE = "model.mla.qk_nope_head_dim"


class _Features(NamedTuple):
    """Inputs or outputs of a linear layer: the setting to change, the size in words, and in how many parts it is."""

    setting: str
    words: str
    size: int
    parts: int = 1


def fp8_sizes_are_aligned(run: Draft) -> Iterator[Violation]:
    """With precision.fp8, the inputs and outputs of the layers' linear layers are multiples of 16."""
    if run.get(_FP8) is None:
        return
    for setting, words, size, _ in (*_whole(run), *_split(run)):
        if size % _ALIGNMENT:
            message = f"{words} ({size}) must be a multiple of {_ALIGNMENT} with {_FP8}={run[_FP8]}"
            rounded = ({setting: round_up(size, _ALIGNMENT)},) if words == setting else ()
            yield Violation("fp8_sizes_are_aligned", setting, message, (*rounded, _without(run)))


def fp8_splits_no_block(run: Draft) -> Iterator[Violation]:
    """With precision.fp8, a tensor-parallel rank has whole groups of queries, and a multiple of 128 features."""
    if run.get(_FP8) is None:
        return
    tensor, groups = run[_TENSOR], run[_GROUPS]
    if groups % tensor and run.get(_LATENT) is None:
        message = (
            f"{_GROUPS} ({groups}) must be divisible by {_TENSOR} ({tensor}) with {_FP8}={run[_FP8]}: ranks that share "
            "a group would each round their part of its gradients"
        )
        split = [{_TENSOR: degree} for degree in reversed(divisors(tensor)) if groups % degree == 0]
        yield Violation("fp8_splits_no_block", _GROUPS, message, (*split, _without(run)))
        return
    for setting, words, size, parts in _split(run):
        if parts == 1 or size % _ALIGNMENT or size % parts or size // parts % _BLOCK == 0:
            continue
        message = (
            f"{words} ({size}) must be divisible by {_BLOCK} x {parts} with {_FP8}={run[_FP8]} and {_TENSOR}={tensor}: "
            "numbers that share a scale are on one rank"
        )
        fewer = [degree for degree in reversed(divisors(tensor)) if degree < tensor and size // degree % _BLOCK == 0]
        fixes = [{_TENSOR: degree, **({_SEQUENCE: False} if degree == 1 else {})} for degree in fewer]
        yield Violation("fp8_splits_no_block", setting, message, (*fixes, _without(run)))


def fp8_sequences_are_whole_blocks(run: Draft) -> Iterator[Violation]:
    """With fp8.wgrad, seq_length is a multiple of 128, and so is each part of a sequence that a rank has."""
    if run.get(_FP8) is None or not run[_WGRAD]:
        return
    context, length = run[_CONTEXT], run[_LENGTH]
    # under sequence parallelism, some layers of latent attention and experts compute a rank's own tokens
    splits_tokens = run[_SEQUENCE] and (run.get(_LATENT) or run.get("model.moe.latent_size"))
    parts = (2 * context if context > 1 else 1) * (run[_TENSOR] if splits_tokens else 1)
    if length % (unit := _BLOCK * parts):
        among = f", which is in {parts} parts," if parts > 1 else ""
        message = (
            f"{_LENGTH} ({length}) must be a multiple of {unit} with {_FP8}={run[_FP8]}: for the gradients of weights, "
            f"{_BLOCK} tokens of a sequence{among} share a scale"
        )
        fixes = ({_LENGTH: round_up(length, unit)}, {_WGRAD: False})
        yield Violation("fp8_sequences_are_whole_blocks", _LENGTH, message, fixes)


def fp8_leaves_layers(run: Draft) -> Iterator[Violation]:
    """With precision.fp8, the layers at the start and the end that are left in bf16 are not all of a stack."""
    if run.get(_FP8) is None:
        return
    layers, left = min(run[_LAYERS], run.get(_DECODER) or run[_LAYERS]), run[_START] + run[_END]
    if left >= layers:
        message = f"{_START} ({run[_START]}) + {_END} ({run[_END]}) must be below the number of layers ({layers})"
        yield Violation("fp8_leaves_layers", _START, message, ({_START: None, _END: None},))


def _without(run: Draft) -> Fix:
    """The run in ``precision.dtype`` alone."""
    others = [name for name in run["experimental"] if name != "fp8"]
    return {"precision.fp8": None, "experimental": others or None}


def _whole(run: Draft) -> list[_Features]:
    """Features that every rank has."""
    names = ("model.hidden_size", "model.mla.q_lora_rank", _LATENT, "model.moe.latent_size")
    found = [_Features(name, name, run[name]) for name in names if run.get(name) is not None]
    if run.get(_LATENT) is not None:
        found.append(_Features(_ROTATED, f"{_LATENT} + {_ROTATED}", run[_LATENT] + run[_ROTATED]))
    return found


def _split(run: Draft) -> list[_Features]:
    """Features that tensor parallelism splits."""
    tensor, heads = run[_TENSOR], run[_HEADS]
    names = ("model.ffn_hidden_size", "model.moe.shared_ffn_hidden_size")
    found = [_Features(name, name, run[name], tensor) for name in names if run.get(name) is not None]
    found.append(_Features(_HEAD, f"{_HEADS} x {_HEAD}", heads * run[_HEAD], tensor))
    if run.get(_LATENT) is not None:
        return [
            *found,
            _Features(_VALUE, f"{_HEADS} x {_VALUE}", heads * run[_VALUE], tensor),
            _Features(_NOPE, f"{_HEADS} x ({_NOPE} + {_VALUE})", heads * (run[_NOPE] + run[_VALUE]), tensor),
        ]
    return [*found, _Features(_HEAD, f"{_GROUPS} x {_HEAD}", run[_GROUPS] * run[_HEAD], tensor)]
