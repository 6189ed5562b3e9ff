"""Rules on the shape of the model."""

from collections.abc import Iterator

from megalith.config.draft import Draft, Violation, divisors, nearest_first, round_up

__all__ = [
    "head_size_is_even_under_rope",
    "heads_divide_hidden_size",
    "modules_predict_within_the_sequence",
    "positions_are_given",
    "positions_reach_the_sequence",
    "query_groups_divide_heads",
]

_HEADS, _GROUPS, _HIDDEN = "model.num_attention_heads", "model.num_query_groups", "model.hidden_size"
_HEAD_SIZE, _POSITIONS = "model.kv_channels", "model.max_position_embeddings"
_MODULES = "model.mtp.num_layers"


def heads_divide_hidden_size(run: Draft) -> Iterator[Violation]:
    """hidden_size is divisible by num_attention_heads, unless kv_channels sets the size of a head."""
    hidden, heads = run[_HIDDEN], run[_HEADS]
    if _HEAD_SIZE in run.given or hidden % heads == 0:
        return
    yield Violation(
        "heads_divide_hidden_size",
        _HEADS,
        f"{_HIDDEN} ({hidden}) must be divisible by {_HEADS} ({heads}), or {_HEAD_SIZE} must be set",
        (
            *({_HEADS: fewer} for fewer in nearest_first(divisors(hidden), heads)),
            {_HIDDEN: round_up(hidden, 2 * heads)},
            {_HEAD_SIZE: round_up(hidden // heads, 2) or 2},
        ),
    )


def head_size_is_even_under_rope(run: Draft) -> Iterator[Violation]:
    """kv_channels is even under rope, which rotates pairs of features."""
    hidden, heads, size = run[_HIDDEN], run[_HEADS], run[_HEAD_SIZE]
    if run["model.position_embedding_type"] != "rope" or size % 2 == 0:
        return
    if _HEAD_SIZE in run.given:
        fixes = [{_HEAD_SIZE: size + 1}]
    else:
        if hidden % heads:
            return  # heads_divide_hidden_size has said so
        even = [count for count in divisors(hidden) if hidden // count % 2 == 0]
        fixes = [{_HIDDEN: hidden + heads}, *({_HEADS: count} for count in nearest_first(even, heads))]
    yield Violation(
        "head_size_is_even_under_rope",
        _HEAD_SIZE,
        f"{_HEAD_SIZE}, the size of a head, must be even under rope; it is {size}",
        (*fixes, {_HEAD_SIZE: size + 1}),
    )


def query_groups_divide_heads(run: Draft) -> Iterator[Violation]:
    """num_attention_heads is divisible by num_query_groups."""
    heads, groups = run[_HEADS], run[_GROUPS]
    if heads % groups == 0:
        return
    yield Violation(
        "query_groups_divide_heads",
        _GROUPS,
        f"{_HEADS} ({heads}) must be divisible by {_GROUPS} ({groups})",
        (
            *({_GROUPS: fewer} for fewer in nearest_first(divisors(heads), groups)),
            {_HEADS: round_up(heads, groups)},
        ),
    )


def positions_reach_the_sequence(run: Draft) -> Iterator[Violation]:
    """max_position_embeddings is at least seq_length under learned_absolute."""
    if run["model.position_embedding_type"] != "learned_absolute":
        return
    positions, sequence = run[_POSITIONS], run["data.seq_length"]
    if positions < sequence:
        yield Violation(
            "positions_reach_the_sequence",
            _POSITIONS,
            f"{_POSITIONS} ({positions}) must be at least data.seq_length ({sequence})",
            ({_POSITIONS: sequence}, {"data.seq_length": positions}),
        )


def modules_predict_within_the_sequence(run: Draft) -> Iterator[Violation]:
    """mtp.num_layers is below seq_length: the last module predicts the token num_layers + 1 ahead."""
    modules, sequence = run[_MODULES], run["data.seq_length"]
    if modules >= sequence:
        message = f"{_MODULES} ({modules}) must be below data.seq_length ({sequence})"
        fixes = [{_MODULES: sequence - 1}] if sequence > 1 else []
        fixes.append({"data.seq_length": modules + 1})
        yield Violation("modules_predict_within_the_sequence", _MODULES, message, tuple(fixes))


def positions_are_given(run: Draft) -> Iterator[Violation]:
    """A model built on its own, with no seq_length to follow, says how many positions it learns."""
    if run["model.position_embedding_type"] == "learned_absolute" and run.get(_POSITIONS) is None:
        message = f"{_POSITIONS} is missing: learned_absolute needs the number of positions"
        yield Violation("positions_are_given", _POSITIONS, message, ({_POSITIONS: 1024},))
