"""Rules on the shape of the model."""

from collections.abc import Iterator
from typing import Any

from megalith.config.draft import Draft, Violation, divisors, nearest_first, round_up

__all__ = [
    "heads_divide_hidden_size",
    "latent_heads_are_those_of_mla",
    "local_base_needs_a_window",
    "modules_predict_within_the_sequence",
    "positions_are_given",
    "positions_reach_the_sequence",
    "query_groups_divide_heads",
    "rotated_features_are_even",
    "scaling_counts_rotations_of_a_pair",
    "scores_have_one_scale",
    "sections_are_all_pairs",
    "yarn_has_one_attention_factor",
]

_HEADS, _GROUPS, _HIDDEN = "model.num_attention_heads", "model.num_query_groups", "model.hidden_size"
_HEAD_SIZE, _POSITIONS = "model.kv_channels", "model.max_position_embeddings"
_LATENT, _NOPE, _ROPE = "model.mla.kv_lora_rank", "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim"
_PERCENT, _SECTIONS, _SCALING = "model.rope.percent", "model.rope.sections", "model.rope.scaling"
_BASE_HEAD_SIZE = "model.mup.base_kv_channels"
_MODULES = "model.mtp.num_modules"


def heads_divide_hidden_size(run: Draft) -> Iterator[Violation]:
    """hidden_size is divisible by num_attention_heads, unless kv_channels sets the head size."""
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


def rotated_features_are_even(run: Draft) -> Iterator[Violation]:
    """rope rotates an even number of features per head, at least 2: all kv_channels, or the share rope.percent.

    With latent attention it rotates mla.qk_rope_head_dim.
    """
    hidden, heads, percent, name = run[_HIDDEN], run[_HEADS], run[_PERCENT], _rotated_size(run)
    size = run[name]
    rotated = int(size * percent)
    if rotated % 2 == 0 and rotated > 0:
        return
    if percent < 1:
        wanted = (
            f"{_PERCENT} ({percent}) of {name} ({size}) must be an even number of features, at least 2; got {rotated}"
        )
        shares = (features / size for features in nearest_first(range(2, size + 1, 2), size * percent))
        yield Violation(
            "rotated_features_are_even", _PERCENT, wanted, (*({_PERCENT: share} for share in shares), {_PERCENT: None})
        )
        return
    if name in run.given:
        fixes = [{name: size + 1}]
    else:
        if hidden % heads:
            return  # reported by heads_divide_hidden_size
        even = [count for count in divisors(hidden) if hidden // count % 2 == 0]
        fixes = [{_HIDDEN: hidden + heads}, *({_HEADS: count} for count in nearest_first(even, heads))]
    yield Violation(
        "rotated_features_are_even",
        name,
        f"{name} ({size}), the number of features that rope rotates in a head, must be even",
        (*fixes, {name: size + 1}),
    )


def _rotated_size(run: Draft) -> str:
    """Returns the setting that holds the number of features per head to which rope applies."""
    return _HEAD_SIZE if run.get(_LATENT) is None else _ROPE


def sections_are_all_pairs(run: Draft) -> Iterator[Violation]:
    """The three numbers of rope.sections add up to the number of feature pairs that rope rotates."""
    sections, rotated = run[_SECTIONS], int(run[_rotated_size(run)] * run[_PERCENT])
    if rotated % 2 or sum(sections) == rotated // 2:
        return  # rotated_features_are_even has reported an odd number
    height = 3 * rotated // 16  # as in Qwen2-VL: 16, 24 and 24 of 64
    yield Violation(
        "sections_are_all_pairs",
        _SECTIONS,
        f"{_SECTIONS} ({', '.join(map(str, sections))}) must add up to {rotated // 2}, the number of feature "
        f"pairs that rope rotates; they add up to {sum(sections)}",
        ({_SECTIONS: [rotated // 2 - 2 * height, height, height]}, {_SECTIONS: None}),
    )


def local_base_needs_a_window(run: Draft) -> Iterator[Violation]:
    """rope.local_base needs attention.window: it is the base in layers with a window."""
    name, window = "model.rope.local_base", "model.attention.window"
    base = run[name]
    if run.get(window) is None:
        message = f"{name} ({base}) needs {window}: it is the base in layers with a window"
        yield Violation("local_base_needs_a_window", name, message, ({name: None}, {window: 4096}))


def scaling_counts_rotations_of_a_pair(run: Draft) -> Iterator[Violation]:
    """llama3 and yarn need original_max_position_embeddings, and a threshold of fast pairs above that of slow ones."""
    kind, length = run[f"{_SCALING}.type"], f"{_SCALING}.original_max_position_embeddings"
    slow, fast = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}.get(
        kind, ("", "")
    )
    if not slow:
        return
    if run.get(length) is None:
        message = (
            f"{length} is missing: {_SCALING}.type={kind} counts the rotations of a feature pair over that many tokens"
        )
        yield Violation("scaling_counts_rotations_of_a_pair", length, message, ({length: 8192},))
    slow, fast = f"{_SCALING}.{slow}", f"{_SCALING}.{fast}"
    if run[fast] <= run[slow]:
        message = f"{fast} ({run[fast]}) must be above {slow} ({run[slow]})"
        fixes = ({fast: None}, {slow: None}, {fast: None, slow: None})
        yield Violation("scaling_counts_rotations_of_a_pair", fast, message, fixes)


def yarn_has_one_attention_factor(run: Draft) -> Iterator[Violation]:
    """rope.scaling sets attention_factor, or both mscale and mscale_all_dim, or none of the three."""
    names = [f"{_SCALING}.{name}" for name in ("attention_factor", "mscale", "mscale_all_dim")]
    given = [name for name in names if run.get(name) is not None]
    if given in ([], names[:1], names[1:]):
        return
    message = f"set {names[0]} alone, or mscale together with mscale_all_dim; got {' and '.join(given)}"
    fixes = (
        *({name: None for name in given if name not in kept} for kept in (names[:1], names[1:])),
        dict.fromkeys(given),
    )
    yield Violation("yarn_has_one_attention_factor", given[0], message, fixes)


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


def latent_heads_are_those_of_mla(run: Draft) -> Iterator[Violation]:
    """mla fixes num_query_groups, kv_channels and rope; it has no qk_norm, output_gate, sink or base_kv_channels."""
    if run.get(_LATENT) is None:
        return
    wanted: dict[str, Any] = {
        _GROUPS: run[_HEADS],
        _HEAD_SIZE: run[_NOPE] + run[_ROPE],
        "model.position_embedding_type": "rope",
        _PERCENT: 1.0,
        "model.attention.softmax": "vanilla",
        "model.attention.qk_norm": None,
        "model.attention.output_gate": False,
        _BASE_HEAD_SIZE: None,
    }
    for name, only in wanted.items():
        if (value := run.get(name)) not in (None, only):
            message = f"{name} ({value}) must be {'null' if only is None else only} with model.mla"
            yield Violation("latent_heads_are_those_of_mla", name, message, ({name: None}, {name: only}))


def scores_have_one_scale(run: Draft) -> Iterator[Violation]:
    """attention.scale cannot be combined with mup.base_kv_channels, which also sets the scale of the scores."""
    name, scale = "model.attention.scale", run.get("model.attention.scale")
    if scale is not None and run.get(_BASE_HEAD_SIZE) is not None:
        message = f"{name} ({scale}) cannot be combined with {_BASE_HEAD_SIZE}, which also sets the factor on q k^T"
        yield Violation("scores_have_one_scale", name, message, ({name: None}, {_BASE_HEAD_SIZE: None}))


def positions_reach_the_sequence(run: Draft) -> Iterator[Violation]:
    """max_position_embeddings is at least seq_length with learned_absolute, unless bert.head=embedding.

    Positions restart in each text of an embedding model's row; its task checks the longest text.
    """
    if run["model.position_embedding_type"] != "learned_absolute" or run.get("model.bert.head") == "embedding":
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
    """mtp.num_modules is below seq_length: the last module predicts the token num_modules + 1 positions ahead."""
    modules, sequence = run[_MODULES], run["data.seq_length"]
    if modules >= sequence:
        message = f"{_MODULES} ({modules}) must be below data.seq_length ({sequence})"
        fixes = [{_MODULES: sequence - 1}] if sequence > 1 else []
        fixes.append({"data.seq_length": modules + 1})
        yield Violation("modules_predict_within_the_sequence", _MODULES, message, tuple(fixes))


def positions_are_given(run: Draft) -> Iterator[Violation]:
    """A model config on its own, without a seq_length to follow, gives max_position_embeddings."""
    if run["model.position_embedding_type"] == "learned_absolute" and run.get(_POSITIONS) is None:
        message = f"{_POSITIONS} is missing: learned_absolute needs the number of positions"
        yield Violation("positions_are_given", _POSITIONS, message, ({_POSITIONS: 1024},))
