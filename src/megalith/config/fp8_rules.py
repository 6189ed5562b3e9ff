"""Rules on FP8 training: sizes that the GEMMs take, and whole blocks of 128 numbers on every rank."""

from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

from megalith.config.draft import Draft, Fix, Violation, divisors, round_up

__all__ = [
    "fp8_has_no_loss_scale",
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
_ANSWERS, _EXPERT_LAYERS = "data.decoder_seq_length", "model.moe.layers"


class _Features(NamedTuple):
    """Inputs or outputs of a linear layer: the setting to change, the size in words, and in how many parts it is."""

    setting: str
    words: str
    size: int
    parts: int = 1


def fp8_has_no_loss_scale(run: Draft) -> Iterator[Violation]:
    """precision.fp8 is not combined with dtype=float16, whose overflow FP8 would hide from the loss scale."""
    if run.get(_FP8) is not None and run["precision.dtype"] == "float16":
        message = (
            f"{_FP8}={run[_FP8]} cannot be combined with precision.dtype=float16: FP8 saturates, so that the loss "
            "scale would not see an overflow"
        )
        fixes = ({"precision.dtype": "bfloat16"}, _without(run))
        yield Violation("fp8_has_no_loss_scale", _FP8, message, fixes)


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
            "numbers that share a scale must be on one rank"
        )
        fewer = [degree for degree in reversed(divisors(tensor)) if degree < tensor and size // degree % _BLOCK == 0]
        fixes = [{_TENSOR: degree, **({_SEQUENCE: False} if degree == 1 else {})} for degree in fewer]
        rounded = [{setting: round_up(size, _BLOCK * parts)}] if words == setting else []
        yield Violation("fp8_splits_no_block", setting, message, (*rounded, *fixes, _without(run)))


def fp8_sequences_are_whole_blocks(run: Draft) -> Iterator[Violation]:
    """With fp8.wgrad, every sequence, and each part of it on a rank, is a multiple of 128 tokens."""
    if run.get(_FP8) is None or not run[_WGRAD]:
        return
    context = run[_CONTEXT]
    # with context parallelism a rank has two parts of each sequence; under sequence parallelism, some layers of latent
    # attention and experts compute a rank's own tokens
    splits_tokens = run[_SEQUENCE] and (run.get(_LATENT) or run.get("model.moe.latent_size"))
    tensor = run[_TENSOR] if splits_tokens else 1
    parts = context * lcm(2, tensor) if context > 1 else tensor
    unit = _BLOCK * parts
    lengths = {_LENGTH: run[_LENGTH]}
    if run.get(_DECODER) is not None:
        lengths[_ANSWERS] = run.get(_ANSWERS)
    for name, length in lengths.items():
        if length is not None and length % unit == 0:
            continue
        among = f" in each of its {parts} parts" if parts > 1 else ""
        given = "unset" if length is None else length
        message = (
            f"{name} ({given}) must be a multiple of {unit} with {_FP8}={run[_FP8]}: for the gradients of weights, "
            f"{_BLOCK} tokens of a sequence share a scale{among}"
        )
        fixes = ({name: round_up(length or run[_LENGTH], unit)}, {_WGRAD: False})
        yield Violation("fp8_sequences_are_whole_blocks", name, message, fixes)


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
    has_mlp = run.get("model.moe.num_experts") is None or not all(run.get(_EXPERT_LAYERS) or (True,))
    names = (*(("model.ffn_hidden_size",) if has_mlp else ()), "model.moe.shared_ffn_hidden_size")
    found = [_Features(name, name, run[name], tensor) for name in names if run.get(name) is not None]
    found.append(_Features(_HEAD, f"{_HEADS} x {_HEAD}", heads * run[_HEAD], tensor))
    if run.get(_LATENT) is not None:
        return [
            *found,
            _Features(_VALUE, f"{_HEADS} x {_VALUE}", heads * run[_VALUE], tensor),
            _Features(_NOPE, f"{_HEADS} x ({_NOPE} + {_VALUE})", heads * (run[_NOPE] + run[_VALUE]), tensor),
        ]
    return [*found, _Features(_HEAD, f"{_GROUPS} x {_HEAD}", run[_GROUPS] * run[_HEAD], tensor)]
