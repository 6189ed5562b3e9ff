"""Rules on the shape of the model."""

from collections.abc import Iterator
from typing import Any

from megalith.config.dotted import parent
from megalith.config.draft import Draft, Violation, divisors, nearest_first, round_up

__all__ = [
    "distances_go_past_the_exact_buckets",
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
    "stacks_of_t5_are_plain",
    "yarn_has_one_attention_factor",
]

_HEADS, _GROUPS, _HIDDEN = "model.num_attention_heads", "model.num_query_groups", "model.hidden_size"
_HEAD_SIZE, _POSITIONS = "model.kv_channels", "model.max_position_embeddings"
_LATENT, _NOPE, _ROPE = "model.mla.kv_lora_rank", "model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim"
_PERCENT, _SECTIONS, _SCALING = "model.rope.percent", "model.rope.sections", "model.rope.scaling"
_BASE_HEAD_SIZE = "model.mup.base_kv_channels"
_MODULES = "model.mtp.num_modules"


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


def rotated_features_are_even(run: Draft) -> Iterator[Violation]:
    """Of a head's kv_channels, rope rotates an even number, at least 2: all of them, or the share rope.percent.

    Of latent attention it rotates mla.qk_rope_head_dim.
    """
    hidden, heads, percent, name = run[_HIDDEN], run[_HEADS], run[_PERCENT], _rotated_size(run)
    size = run[name]
    rotated = int(size * percent)
    if rotated % 2 == 0 and rotated > 0:
        return
    if percent < 1:
        wanted = f"{_PERCENT} ({percent}) of {name} ({size}) must be an even number of features; it is {rotated}"
        shares = (features / size for features in nearest_first(range(2, size + 1, 2), size * percent))
        yield Violation(
            "rotated_features_are_even", _PERCENT, wanted, (*({_PERCENT: share} for share in shares), {_PERCENT: None})
        )
        return
    if name in run.given:
        fixes = [{name: size + 1}]
    else:
        if hidden % heads:
            return  # heads_divide_hidden_size has said so
        even = [count for count in divisors(hidden) if hidden // count % 2 == 0]
        fixes = [{_HIDDEN: hidden + heads}, *({_HEADS: count} for count in nearest_first(even, heads))]
    yield Violation(
        "rotated_features_are_even",
        name,
        f"{name}, the size of a head, must be even under rope; it is {size}",
        (*fixes, {name: size + 1}),
    )


def _rotated_size(run: Draft) -> str:
    """The setting that has the size of what rope rotates of a head, or a share of."""
    return _HEAD_SIZE if run.get(_LATENT) is None else _ROPE


def sections_are_all_pairs(run: Draft) -> Iterator[Violation]:
    """The three numbers of rope.sections add up to the pairs of features that rope rotates."""
    sections, rotated = run[_SECTIONS], int(run[_rotated_size(run)] * run[_PERCENT])
    if rotated % 2 or sum(sections) == rotated // 2:
        return  # rotated_features_are_even has reported an odd number
    height = 3 * rotated // 16  # as in Qwen2-VL: 16, 24 and 24 of 64
    yield Violation(
        "sections_are_all_pairs",
        _SECTIONS,
        f"{_SECTIONS} ({', '.join(map(str, sections))}) must add up to {rotated // 2}, the pairs of features that are "
        f"rotated; they add up to {sum(sections)}",
        ({_SECTIONS: [rotated // 2 - 2 * height, height, height]}, {_SECTIONS: None}),
    )


def local_base_needs_a_window(run: Draft) -> Iterator[Violation]:
    """rope.local_base needs attention.window: it is the base in layers that have one."""
    name, window = "model.rope.local_base", "model.attention.window"
    base = run[name]
    if run.get(window) is None:
        message = f"{name} ({base}) needs {window}: it is the base in layers with a window"
        yield Violation("local_base_needs_a_window", name, message, ({name: None}, {window: 4096}))


def scaling_counts_rotations_of_a_pair(run: Draft) -> Iterator[Violation]:
    """llama3 and yarn need original_max_position_embeddings, and more rotations of fast pairs than of slow ones."""
    kind, length = run[f"{_SCALING}.type"], f"{_SCALING}.original_max_position_embeddings"
    slow, fast = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}.get(
        kind, ("", "")
    )
    if not slow:
        return
    if run.get(length) is None:
        message = f"{length} is missing: {_SCALING}.type={kind} counts the rotations of a pair over so many tokens"
        yield Violation("scaling_counts_rotations_of_a_pair", length, message, ({length: 8192},))
    slow, fast = f"{_SCALING}.{slow}", f"{_SCALING}.{fast}"
    if run[fast] <= run[slow]:
        message = f"{fast} ({run[fast]}) must be above {slow} ({run[slow]})"
        fixes = ({fast: None}, {slow: None}, {fast: None, slow: None})
        yield Violation("scaling_counts_rotations_of_a_pair", fast, message, fixes)


def yarn_has_one_attention_factor(run: Draft) -> Iterator[Violation]:
    """rope.scaling has an attention_factor, or both of mscale and mscale_all_dim, or none of the three."""
    names = [f"{_SCALING}.{name}" for name in ("attention_factor", "mscale", "mscale_all_dim")]
    given = [name for name in names if run.get(name) is not None]
    if given in ([], names[:1], names[1:]):
        return
    message = f"{names[0]} stands alone, and mscale together with mscale_all_dim; got {' and '.join(given)}"
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


def distances_go_past_the_exact_buckets(run: Draft) -> Iterator[Violation]:
    """relative_position.num_buckets is divisible by 4, and max_distance above half of it: the rest is beyond."""
    buckets, distance = "model.relative_position.num_buckets", "model.relative_position.max_distance"
    count, longest, rule = run[buckets], run[distance], "distances_go_past_the_exact_buckets"
    if count % 4:
        message = f"{buckets} ({count}) must be divisible by 4: by directions, and near or far"
        yield Violation(rule, buckets, message, ({buckets: round_up(count, 4)}, {buckets: None}))
    elif longest <= count // 2:
        message = f"{distance} ({longest}) must be above {count // 2}, the distances that have buckets of their own"
        yield Violation(rule, distance, message, ({distance: 4 * count}, {distance: None}))


def stacks_of_t5_are_plain(run: Draft) -> Iterator[Violation]:
    """position_embedding_type=relative and model.t5 go together, without experts, latent attention or mtp."""
    rule, kind, decoder = "stacks_of_t5_are_plain", "model.position_embedding_type", "model.t5.num_decoder_layers"
    is_t5 = run.get(decoder) is not None
    if is_t5 != (run[kind] == "relative"):
        message = f"{kind} ({run[kind]}) must be relative with model.t5, and with model.t5 alone"
        yield Violation(rule, kind, message, ({kind: "relative"} if is_t5 else {kind: None},))
    if not is_t5:
        return
    wanted: dict[str, Any] = {
        _LATENT: None,
        _MODULES: None,
        "model.moe.num_experts": None,
        "model.attention.window": None,
        "model.mup.base_hidden_size": None,
    }
    for name, only in wanted.items():
        if (value := run.get(name)) != only:
            group = parent(name) if parent(name) not in ("model", "model.attention") else name
            message = f"{name} ({value}) has no place in a T5"
            yield Violation(rule, name, message, ({group: None},))


def latent_heads_are_those_of_mla(run: Draft) -> Iterator[Violation]:
    """mla has a key for each query head, of its own size, and rope; none of what is for groups of heads alone."""
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
    """attention.scale is not given beside mup.base_kv_channels, which scales the scores by the size of heads."""
    name, scale = "model.attention.scale", run.get("model.attention.scale")
    if scale is not None and run.get(_BASE_HEAD_SIZE) is not None:
        message = f"{name} ({scale}) has no place beside {_BASE_HEAD_SIZE}, which sets the factor on q k^T, too"
        yield Violation("scores_have_one_scale", name, message, ({name: None}, {_BASE_HEAD_SIZE: None}))


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
    """mtp.num_modules is below seq_length: the last module predicts the token num_layers + 1 ahead."""
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
