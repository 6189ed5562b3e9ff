"""Rules on T5: options that its two stacks do not support, and the buckets of its relative positions."""

from collections.abc import Iterator
from typing import Any

from megalith.config.draft import Draft, Violation, round_up

__all__ = ["answers_are_not_split", "distances_go_past_the_exact_buckets", "stacks_of_t5_are_plain"]

_DECODER, _POSITIONS = "model.t5.num_decoder_layers", "model.position_embedding_type"
_EVERY = "train.generation.every"
_BUCKETS, _FARTHEST = "model.relative_position.num_buckets", "model.relative_position.max_distance"
_HEADS, _GROUPS = "model.num_attention_heads", "model.num_query_groups"


def answers_are_not_split(run: Draft) -> Iterator[Violation]:
    """train.generation with model.t5 has neither parallel.context > 1 nor parallel.sequence."""
    if run.get(_DECODER) is None or run.get(_EVERY) is None:
        return
    for name, whole in (("parallel.context", 1), ("parallel.sequence", False)):
        if (value := run[name]) != whole:
            message = (
                f"{name} ({value}) must be {whole} with model.t5 and train.generation: a T5 generates one token at a "
                "time, which cannot be split over ranks"
            )
            yield Violation("answers_are_not_split", name, message, ({"train.generation": None}, {name: whole}))


def distances_go_past_the_exact_buckets(run: Draft) -> Iterator[Violation]:
    """relative_position.num_buckets is divisible by 4, and max_distance is above half of it."""
    count, farthest, rule = run[_BUCKETS], run[_FARTHEST], "distances_go_past_the_exact_buckets"
    if count % 4:
        message = f"{_BUCKETS} ({count}) must be divisible by 4, to split by direction and into near and far distances"
        yield Violation(rule, _BUCKETS, message, ({_BUCKETS: round_up(count, 4)}, {_BUCKETS: None}))
    elif farthest <= count // 2:
        message = f"{_FARTHEST} ({farthest}) must be above {count // 2}, the number of distances with their own bucket"
        yield Violation(rule, _FARTHEST, message, ({_FARTHEST: 4 * count}, {_FARTHEST: None}))


def stacks_of_t5_are_plain(run: Draft) -> Iterator[Violation]:
    """position_embedding_type=relative and model.t5 need each other; T5 has plain attention with one key per head."""
    rule, is_t5, positions = "stacks_of_t5_are_plain", run.get(_DECODER) is not None, run[_POSITIONS]
    if is_t5 != (positions == "relative"):
        message = f"{_POSITIONS} ({positions}) {'must be relative with' if is_t5 else 'needs'} model.t5"
        yield Violation(rule, _POSITIONS, message, ({_POSITIONS: "relative"} if is_t5 else {_POSITIONS: None},))
    if not is_t5:
        return
    # a setting, its value in a T5, and what to remove to get it
    wanted: tuple[tuple[str, Any, str], ...] = (
        ("model.bert.num_token_types", None, "model.bert"),
        ("model.mla.kv_lora_rank", None, "model.mla"),
        ("model.moe.num_experts", None, "model.moe"),
        ("model.mtp.num_modules", None, "model.mtp"),
        ("model.mup.base_hidden_size", None, "model.mup"),
        ("model.attention.window", None, "model.attention.window"),
        ("model.attention.qk_norm", None, "model.attention.qk_norm"),
        ("model.attention.softmax", "vanilla", "model.attention.softmax"),
        ("model.attention.output_gate", False, "model.attention.output_gate"),
        (_GROUPS, run[_HEADS], _GROUPS),
    )
    for name, only, to_take_out in wanted:
        if (value := run.get(name)) not in (None, only):
            message = f"{name} ({value}) must be {'null' if only is None else only} with model.t5"
            yield Violation(rule, name, message, ({to_take_out: None},))
