"""Reduces a recipe for verification: the same features, with fewer and smaller layers and samples of a few tokens.

What divides evenly still does and what does not still does not: layers over stages, query groups over ranks, the
vocabulary. An encoder and a decoder are placed on stages as in the full recipe, if there are enough stages
(``stacks``). The initial standard deviation is scaled by the square root of the reduction in hidden size, so that
activations keep their scale and attention does not degenerate to an average.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

from megalith.config import RunConfig, TransformerConfig, as_tree, load_run, parse_batch_size_schedule
from megalith.config.draft import round_up
from megalith.config.layout import Layout
from megalith.config.settings_tree import applied
from megalith.insight.verify.cover import FOLDED, Degrees
from megalith.insight.verify.experts import comparable_at, small_experts
from megalith.insight.verify.stacks import listed, small_stacks
from megalith.training.tasks.choose import task_of

__all__ = ["EOD", "SEQ_LENGTH", "on_layout", "on_one_process", "small_recipe"]

Tree = dict[str, Any]

SEQ_LENGTH = 16  # four context-parallel ranks have two chunks of two tokens each
EOD = 0
_DECODER = "model.t5.num_decoder_layers"
_HEAD_SIZE = 8
_LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16}  # divisible by the shard and context degrees
_WINDOW = 5  # ends inside the chunks of a context-parallel rank
_PRIME, _EVEN = 61, 64  # vocabulary sizes
_MOST_CLASSES = 3  # fewer than a context-parallel rank's tokens of a row, so that records cannot confuse the two
_EMBEDDING_SIZE = 8
_WIDEST_STD = 0.1
_STD_OF_FIRST_TOKENS = 0.3
_SMALLEST_EPS = 1e-6
_FEW_ROWS = 0.7  # less than balanced loads, so that even those take several turns

# settings for the user's files, settings without effect in two steps, and settings that each small run sets itself
_LEFT_OUT = (
    "load",
    "resume",
    "tracking",
    "experimental",
    "checkpoint",
    "data.weights",
    "data.phases",
    "data.valid",
    "data.tokenizer",
    "data.long_conversations",
    "train.compile",
    "train.compile_fusions",
    "train.evaluation",
    "train.generation",
    "train.time_limit",
    "train.batch_size_schedule_unit",
    "optim.warmup_steps",
    "precision",
    "parallel",
)


def small_recipe(
    config: RunConfig, layout: Layout, shown: Mapping[str, Sequence[int]], rows: Sequence[Degrees]
) -> Tree:
    """Returns reduced settings of ``config``, which runs in ``layout``.

    They are valid in all of the layouts ``rows``, whose degrees are ``shown``: all runs have the same model and the
    same batches. ``data.train`` and ``run`` are not set yet.
    """
    left_out = dict.fromkeys(_LEFT_OUT)
    changes = {**left_out, **_model(config, layout, shown), **_course(config, rows)}
    if config.model.moe is not None:
        changes |= small_experts(config.model.moe, changes["model.hidden_size"], rows)
        changes["model.moe.layers"] = _expert_layers(config.model, changes["model.num_layers"])
    small = applied(as_tree(config), changes)
    if config.model.t5 is None or "pipeline" not in shown:
        return small
    return applied(small, _stacks(config, small, shown["pipeline"]))


def on_one_process(small: Tree) -> Tree:
    """``small`` for one process, without activation recomputation.

    It processes each batch as a whole, or in micro-batches if the numbers depend on them.
    """
    return applied(small, {"train.recompute": None, "train.recompute_modules": None})


def on_layout(small: Tree, config: RunConfig, degrees: Degrees, dtype: str) -> Tree:
    """``small`` in a layout of ``degrees``, with the parallelism settings of ``config`` for these axes."""
    parallel, changes = config.parallel, dict[str, Any]({f"parallel.{axis}": size for axis, size in degrees.items()})
    changes |= {"parallel.shard": degrees.get("shard", 1), "precision.dtype": dtype}
    changes["train.micro_batch_size"] = _micro_batch_size(small, config, degrees)
    if "tensor" in degrees:
        changes["parallel.sequence"] = parallel.sequence
    if "context" in degrees:
        changes["parallel.context_method"] = parallel.context_method
        changes["parallel.context_inner"] = 2 if parallel.context_method == "two_level" else None
    if "pipeline" in degrees:
        virtual = min(parallel.virtual, 2)
        changes |= {"parallel.virtual": virtual, "parallel.schedule": parallel.schedule}
        if parallel.stage_layers is not None:
            num_stages, model = degrees["pipeline"] * virtual, small["model"]
            num_layers = model["num_layers"] + (model["t5"]["num_decoder_layers"] if model.get("t5") else 0)
            changes["parallel.stage_layers"] = listed(parallel.stage_layers, num_layers, num_stages)
    if config.model.moe is not None:
        dispatch = parallel.dispatch
        changes["parallel.expert_tensor"] = degrees.get("expert_tensor", 1)
        gathers = dispatch.method == "all_gather" and any(axis in degrees for axis in FOLDED)
        changes["parallel.dispatch.method"] = "all_gather" if gathers else "all_to_all"
        changes["parallel.dispatch.max_rows"] = dispatch.max_rows and min(dispatch.max_rows, _FEW_ROWS)
    return applied(small, changes)


def _micro_batch_size(small: Tree, config: RunConfig, degrees: Degrees) -> int:
    """The micro-batch size of each rank that makes its numbers comparable with one process."""
    of_one_process: int = small["train"]["micro_batch_size"]
    match comparable_at(config.model.moe):
        case "any":
            return _batch(small) // _num_micro_batches(degrees)
        case "equal micro-batches":
            return of_one_process
        case "equal numbers of them":
            return of_one_process // _data_parallel(degrees)


def _data_parallel(degrees: Degrees) -> int:
    return degrees.get("replicate", 1) * degrees.get("shard", 1)


def _num_micro_batches(degrees: Degrees) -> int:
    """Over all data-parallel ranks: enough for gradient accumulation, and for a steady state of a pipeline."""
    return _data_parallel(degrees) * (4 if "pipeline" in degrees else 2)


def _batch(small: Tree) -> int:
    """The global batch size of the first step."""
    train = small["train"]
    schedule = train.get("batch_size_schedule")
    size: int = parse_batch_size_schedule(schedule)[0].global_batch_size if schedule else train["global_batch_size"]
    return size


def _batch_sizes(config: RunConfig, rows: Sequence[Degrees]) -> tuple[int, int]:
    """The global batch size of the first step, and the micro-batch size of one process."""
    most = max([4, *map(_num_micro_batches, rows)])
    match comparable_at(config.model.moe):
        case "any":
            return most, most
        case "equal micro-batches":
            return 2 * most, 2  # several sequences in each
        case "equal numbers of them":
            together = 2 * max(map(_data_parallel, rows), default=1)
            return (4 if any("pipeline" in row for row in rows) else 2) * together, together


def _model(config: RunConfig, layout: Layout, shown: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The shape of the model, which every layout of ``shown`` can split."""
    model, tensor = config.model, layout.tensor
    heads, groups = _heads(config, layout, shown)
    # the hidden size equals the width of all heads, or is larger, or smaller
    width = heads * _HEAD_SIZE
    given, usual = model.hidden_size, model.num_attention_heads * model.kv_channels
    hidden = width if given == usual else 2 * width if given > usual else max(width // 2, 8)
    longest, scale = model.max_position_embeddings, model.attention.scale
    divides = model.vocab_size is not None and model.vocab_size % tensor == 0
    wider = model.init_method_std * sqrt(max(1.0, model.hidden_size / hidden))
    return {
        "model.preset": None,
        "model.vocab_size": _EVEN if divides else _PRIME,
        **_num_layers(config, layout, max(shown.get("pipeline", (1,)))),
        "model.hidden_size": hidden,
        "model.num_attention_heads": heads,
        "model.num_query_groups": groups,
        "model.kv_channels": _HEAD_SIZE,
        "model.ffn_hidden_size": 3 * hidden // 2,
        "model.attention.scale": scale and scale * sqrt(model.kv_channels / _HEAD_SIZE),
        "model.max_position_embeddings": longest and SEQ_LENGTH + 4 * (longest > config.data.seq_length),
        "model.mup.base_hidden_size": model.mup and max(round(hidden / model.width), 1),
        "model.mup.base_kv_channels": model.mup and model.mup.base_kv_channels and _HEAD_SIZE,
        "model.mtp.num_modules": model.mtp and min(model.mtp.num_modules, 2),
        "model.init_method_std": max(model.init_method_std, min(wider, _WIDEST_STD)),
        "model.bert.num_classes": model.bert and model.bert.num_classes and min(model.bert.num_classes, _MOST_CLASSES),
        "data.seq_length": SEQ_LENGTH,
        "data.decoder_seq_length": None,  # the default has room for the masked tokens
        **_embedding(model),
        **_latents(model),
        **_positions(model),
        **_windows(model, config.data.seq_length),
    }


def _embedding(model: TransformerConfig) -> dict[str, Any]:
    """Sizes of an embedding model: a row has room for a query and one passage.

    The embeddings of an untrained model are nearly the same. A low temperature would enlarge the rounding of their
    similarities beyond what float32 is allowed. First tokens differ in what they attend to only, so that even at
    temperature 1 the gradients are small differences, unless the weights are large.
    """
    if model.bert is None or model.bert.head != "embedding":
        return {}
    size = model.bert.embedding_size and _EMBEDDING_SIZE
    changes = {"model.bert.embedding_size": size, "model.bert.similarity_temperature": 1.0, "data.num_negatives": None}
    if model.bert.embedding_pooling == "first":
        changes["model.init_method_std"] = max(model.init_method_std, _STD_OF_FIRST_TOKENS)
    return changes


def _latents(model: TransformerConfig) -> dict[str, Any]:
    """MLA sizes: latents if the model has them, half-rotated heads, values as wide as queries if the model's are."""
    if (mla := model.mla) is None:
        return {}
    sizes = {
        **{name: size for name, size in _LATENTS.items() if getattr(mla, name) is not None},
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), _HEAD_SIZE // 2),
        "v_head_dim": _HEAD_SIZE if mla.v_head_dim == model.kv_channels else _HEAD_SIZE // 2 + 1,
    }
    return {f"model.mla.{name}": size for name, size in sizes.items()}


def _positions(model: TransformerConfig) -> dict[str, Any]:
    """Rotary embedding: the share of rotated features, as closely as even numbers allow, and pairs for each section."""
    if (rope := model.rope) is None:
        return {}
    half = _HEAD_SIZE // (2 if model.mla is None else 4)
    pairs = half if rope.percent == 1 else min(max(round(rope.percent * half), 1), half - 1)
    height = 3 * pairs // 8  # as in Qwen2-VL
    return {
        "model.rope.percent": pairs / half,
        "model.rope.sections": rope.sections and [pairs - 2 * height, height, height],
        "model.rope.layers": _pattern(model, rope.layers, "rotates"),
    }


def _windows(model: TransformerConfig, seq_length: int) -> dict[str, Any]:
    """Attention window, which is narrower than a row if that of ``model`` is."""
    window, pattern = model.attention.window, model.attention.window_layers
    return {
        "model.attention.window": window and (_WINDOW if window < seq_length else SEQ_LENGTH),
        "model.attention.window_layers": _pattern(model, pattern, "has_window"),
    }


class _KindOfLayer(NamedTuple):
    has_window: bool
    rotates: bool
    has_experts: bool


def _kinds_of_layers(model: TransformerConfig) -> list[_KindOfLayer]:
    """The kinds of layers in the model, each once."""
    kinds = (
        _KindOfLayer(
            has_window=model.attention.window_of(layer) is not None,
            rotates=model.rope is not None and model.rope.rotates(layer),
            has_experts=model.moe is not None and model.moe.has_experts(layer),
        )
        for layer in range(model.num_layers)
    )
    return list(dict.fromkeys(kinds))


def _pattern(model: TransformerConfig, large: Sequence[bool] | None, name: str) -> list[bool] | None:
    """The pattern ``large`` of the property ``name`` over layers, reduced to each kind of layer once."""
    return None if large is None else [getattr(kind, name) for kind in _kinds_of_layers(model)]


def _expert_layers(model: TransformerConfig, num_layers: int) -> list[bool] | None:
    """Which of ``num_layers`` layers, and of the multi-token prediction modules, have experts, as in ``model``."""
    assert model.moe is not None, "it has experts"
    pattern = _pattern(model, model.moe.layers, "has_experts")
    if pattern is None or model.mtp is None:
        return pattern
    layers = [pattern[layer % len(pattern)] for layer in range(num_layers)]
    return layers + [model.moe.has_experts(model.num_layers + number) for number in range(model.mtp.num_modules)]


def _heads(config: RunConfig, layout: Layout, shown: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Numbers of query heads and groups; tensor-parallel ranks share a group, or have several, as in ``layout``."""
    heads, groups, parallel = config.model.num_attention_heads, config.model.num_query_groups, config.parallel
    tensor, trades = max(shown.get("tensor", (1,))), parallel.context_method == "all_to_all"
    some = max(2, *shown.get("context", (2,))) if trades else 2  # divisible by the context degree
    several = some if heads // layout.tensor > 1 else 1
    if groups == heads:
        return several * tensor, several * tensor
    if groups < layout.tensor:
        return several * tensor, 2 if groups > 1 else 1
    trading = {"all_to_all": layout.context, "two_level": parallel.context_inner or 1}.get(parallel.context_method, 1)
    here = groups // layout.tensor
    groups_here = some if here > 1 and here % trading == 0 else 1
    in_group = 3 if heads // groups % 2 and trading == 1 else 2 if groups_here > 1 else some
    return in_group * groups_here * tensor, groups_here * tensor


def _num_layers(config: RunConfig, layout: Layout, pipeline: int) -> dict[str, int]:
    """Numbers of layers: one per stage, plus one if stages are uneven; two without a pipeline; at least one per kind.

    Twice as many for an encoder and a decoder, so that each can span several stages; ``_stacks`` distributes them.
    """
    model, num_kinds, num_stages = config.model, len(_kinds_of_layers(config.model)), layout.pipeline
    if num_stages == 1:
        sizes = {"model.num_layers": max(min(model.num_layers, 2), num_kinds)}
        return sizes if model.t5 is None else {**sizes, _DECODER: min(model.t5.num_decoder_layers, 2)}
    listed = config.parallel.stage_layers or ()
    uneven = model.total_num_layers % (num_stages * config.parallel.virtual) > 0 or len(set(listed)) > 1
    small_stages = pipeline * min(config.parallel.virtual, 2)
    if model.t5 is None:
        return {"model.num_layers": round_up(num_kinds, small_stages) + uneven}
    num_layers = 2 * small_stages + uneven
    return {"model.num_layers": num_layers - num_layers // 2, _DECODER: num_layers // 2}


def _stacks(config: RunConfig, small: Tree, pipelines: Sequence[int]) -> dict[str, int]:
    """Numbers of encoder and decoder layers, placed on the stages of ``pipelines`` as ``config`` places its own."""
    run = load_run(on_one_process(small), world_size=1)
    num_stages = [pipeline * min(config.parallel.virtual, 2) for pipeline in pipelines]
    smallest = run.model.total_num_layers
    uneven = smallest % max(num_stages) > 0
    encoder, decoder = small_stacks(config, task_of(run).costs(), smallest, uneven, num_stages)
    return {"model.num_layers": encoder, _DECODER: decoder}


def _course(config: RunConfig, rows: Sequence[Degrees]) -> dict[str, Any]:
    """Training settings: two steps without warmup; with a batch size schedule, the steps have different sizes."""
    optim, (batch, micro_batch) = config.optim, _batch_sizes(config, rows)
    changes: dict[str, Any] = {
        "train.steps": 2,
        "train.global_batch_size": batch,
        "train.micro_batch_size": micro_batch,
    }
    if config.train.batch_size_schedule is not None:
        changes["train.global_batch_size"] = None
        changes["train.batch_size_schedule"] = f"0:{batch} {batch}:{2 * batch}"
    if optim.decay_steps is not None:
        changes["optim.decay_steps"] = 4  # longer than the two steps
    if optim.wsd is not None:
        changes["optim.wsd.decay_steps"] = 2
    if optim.adamw is not None:
        # a gradient that is zero except for rounding errors moves a weight by its ratio to eps
        changes["optim.adamw.eps"] = max(optim.adamw.eps, _SMALLEST_EPS)
    return changes
