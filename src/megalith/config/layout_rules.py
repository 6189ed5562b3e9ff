"""Rules that relate the layout to the model that it splits and the batch that it distributes."""

import functools
from collections.abc import Iterator
from math import gcd, lcm, prod

from megalith.config.batch_size_schedule import parse_batch_size_schedule, with_batch_sizes
from megalith.config.draft import DENSE_DEGREES, Draft, Fix, Unknown, Violation, divisors, nearest_first, round_up
from megalith.config.layout import Layout
from megalith.errors import ConfigError, TopologyError

__all__ = [
    "batches_divide_among_ranks",
    "context_method_needs_context_parallel",
    "degrees_multiply_to_the_world_size",
    "heads_divide_among_context_ranks",
    "heads_divide_among_tensor_ranks",
    "hidden_size_divides_among_shards",
    "query_groups_divide_among_tensor_ranks",
    "sequence_divides_among_context_ranks",
    "sequence_divides_among_tensor_ranks",
    "sequence_parallel_needs_tensor_parallel",
    "two_levels_divide_context",
]

_HEADS, _GROUPS = "model.num_attention_heads", "model.num_query_groups"
_LATENT = "model.mla.kv_lora_rank"
_TENSOR, _SEQUENCE = "parallel.tensor", "parallel.sequence"
_CONTEXT, _METHOD, _INNER = "parallel.context", "parallel.context_method", "parallel.context_inner"
_REPLICATE, _SHARD = "parallel.replicate", "parallel.shard"
_PIPELINE = "parallel.pipeline"
_BATCH, _MICRO, _SCHEDULE = "train.global_batch_size", "train.micro_batch_size", "train.batch_size_schedule"


def degrees_multiply_to_the_world_size(run: Draft) -> Iterator[Violation]:
    """tensor x context x pipeline x replicate x shard is the number of ranks; shard=-1 takes the remaining ranks."""
    world = run.world_size
    if world is None:
        return
    degrees: dict[str, int] = {name: run[f"parallel.{name}"] for name in DENSE_DEGREES}
    try:
        Layout.resolve(world, **degrees, expert_tensor=1)  # the expert degrees have a rule of their own
    except TopologyError:
        shard = degrees.pop("shard")
        always = ("tensor", "replicate")
        named = {f"parallel.{name}": degree for name, degree in degrees.items() if name in always or degree > 1}
        product = " x ".join(f"{name} ({degree})" for name, degree in named.items())
        wanted = f"{product} must divide" if shard == -1 else f"{product} x {_SHARD} ({shard}) must equal"
        fixes = [{_SHARD: -1}, *_layouts(run), *_shorter_pipelines(run)]
        needed = prod(named.values()) * max(shard, 1)
        more = f"; --nproc {needed} would start {needed}" if world < needed else ""
        message = f"{wanted} the number of ranks ({world}{more})"
        yield Violation("degrees_multiply_to_the_world_size", _TENSOR, message, tuple(fixes))


def heads_divide_among_tensor_ranks(run: Draft) -> Iterator[Violation]:
    """num_attention_heads, ffn_hidden_size and moe.shared_ffn_hidden_size are divisible by tensor."""
    tensor = run[_TENSOR]
    for name in (_HEADS, "model.ffn_hidden_size", "model.moe.shared_ffn_hidden_size"):
        if (size := run.get(name)) is None or size % tensor == 0:
            continue
        more, common = {name: round_up(size, tensor)}, gcd(size, tensor)
        fixes = [*_layouts(run), more] if name == _HEADS else [more, *_layouts(run)]
        fixes.append({_TENSOR: common} | ({_SEQUENCE: False} if common == 1 else {}))  # for a world that is wrong too
        message = f"{name} ({size}) must be divisible by {_TENSOR} ({tensor})"
        yield Violation("heads_divide_among_tensor_ranks", name, message, tuple(fixes))


def query_groups_divide_among_tensor_ranks(run: Draft) -> Iterator[Violation]:
    """num_query_groups is divisible by tensor, or divides it; then several ranks share a group."""
    tensor, groups, heads = run[_TENSOR], run[_GROUPS], run[_HEADS]
    # by default there are as many groups as heads, which have a rule of their own
    if _GROUPS not in run.given or groups % tensor == 0 or tensor % groups == 0:
        return
    others = [count for count in divisors(heads) if count % tensor == 0 or tensor % count == 0]
    fixes = [*_layouts(run), *({_GROUPS: count} for count in nearest_first(others, groups))]
    message = f"{_GROUPS} ({groups}) must be divisible by {_TENSOR} ({tensor}), or divide it"
    yield Violation("query_groups_divide_among_tensor_ranks", _GROUPS, message, tuple(fixes))


def sequence_parallel_needs_tensor_parallel(run: Draft) -> Iterator[Violation]:
    """sequence needs tensor above 1: it splits activations over the tensor-parallel ranks."""
    if run[_SEQUENCE] and run[_TENSOR] == 1:
        message = f"{_SEQUENCE}=true needs {_TENSOR} above 1; got 1"
        fixes = ({_SEQUENCE: False}, {_TENSOR: 2})
        yield Violation("sequence_parallel_needs_tensor_parallel", _SEQUENCE, message, fixes)


def sequence_divides_among_tensor_ranks(run: Draft) -> Iterator[Violation]:
    """seq_length is divisible by tensor under sequence parallelism."""
    tensor, length = run[_TENSOR], run["data.seq_length"]
    if run[_SEQUENCE] and length % tensor:
        message = f"data.seq_length ({length}) must be divisible by {_TENSOR} ({tensor}) with {_SEQUENCE}=true"
        longer, shorter = round_up(length, tensor), length - length % tensor
        # longer first, unless learned positions end before it
        fixes = [{"data.seq_length": size} for size in (longer, shorter) if size] + [{_SEQUENCE: False}]
        yield Violation("sequence_divides_among_tensor_ranks", "data.seq_length", message, tuple(fixes))


def context_method_needs_context_parallel(run: Draft) -> Iterator[Violation]:
    """context_method needs context above 1: it selects how those ranks exchange keys and values."""
    if run[_METHOD] != "ring" and run[_CONTEXT] == 1:
        message = f"{_METHOD}={run[_METHOD]} needs {_CONTEXT} above 1; got 1"
        yield Violation("context_method_needs_context_parallel", _METHOD, message, (_ring(run), {_CONTEXT: 2}))


def sequence_divides_among_context_ranks(run: Draft) -> Iterator[Violation]:
    """seq_length is divisible by 2 x context, and each rank's part by tensor under sequence parallelism."""
    context, length = run[_CONTEXT], run["data.seq_length"]
    unit = lcm(2 * context, context * (run[_TENSOR] if run[_SEQUENCE] else 1))
    if context > 1 and length % unit:
        sequence = f" and {_SEQUENCE}=true over {run[_TENSOR]} ranks" if run[_SEQUENCE] else ""
        message = f"data.seq_length ({length}) must be divisible by {unit} with {_CONTEXT}={context}{sequence}"
        sizes = [size for size in (round_up(length, unit), length - length % unit) if size]
        fewer = [degree for degree in reversed(divisors(context)) if degree < context]
        fixes = [{"data.seq_length": size} for size in sizes] + [_context(run, degree) for degree in fewer]
        yield Violation("sequence_divides_among_context_ranks", "data.seq_length", message, tuple(fixes))


def two_levels_divide_context(run: Draft) -> Iterator[Violation]:
    """With context_method=two_level, context_inner divides context and is neither 1 nor context itself."""
    context, inner = run[_CONTEXT], run.get(_INNER)
    if run[_METHOD] != "two_level" or context == 1:
        return
    able = [degree for degree in divisors(context) if 1 < degree < context]
    if inner not in able:
        message = f"{_METHOD}=two_level needs {_INNER} to divide {_CONTEXT} ({context}) and be smaller; got {inner}"
        better = [{_INNER: degree} for degree in nearest_first(able, inner or 2)]
        fixes: list[Fix] = [*better, _ring(run)]
        yield Violation("two_levels_divide_context", _INNER, message, tuple(fixes))


def heads_divide_among_context_ranks(run: Draft) -> Iterator[Violation]:
    """The heads of a tensor-parallel rank are divisible by the ranks that exchange them: context, or context_inner."""
    method, heads, tensor = run[_METHOD], run[_HEADS], run[_TENSOR]
    if method not in ("all_to_all", "two_level") or heads % tensor:
        return
    name = _CONTEXT if method == "all_to_all" else _INNER
    if heads // tensor % run[name]:
        message = (
            f"{_METHOD}={method} needs {name} ({run[name]}) to divide the {heads // tensor} attention heads of a "
            "tensor-parallel rank"
        )
        fixes = [_ring(run)]
        fixes += [{name: degree} for degree in nearest_first(divisors(heads // tensor), run[name]) if degree > 1]
        yield Violation("heads_divide_among_context_ranks", name, message, tuple(fixes))


def hidden_size_divides_among_shards(run: Draft) -> Iterator[Violation]:
    """hidden_size, and the latents of mla, are divisible by shard x context: FSDP needs equal shards."""
    shard = run.layout.shard * run.layout.context
    units = {"model.hidden_size": _hidden_unit(run, shard), "model.mla.q_lora_rank": shard, _LATENT: shard}
    for name, unit in units.items():
        if (size := run.get(name)) is not None and size % shard:
            of_context = f" x {_CONTEXT}" if run.layout.context > 1 else ""
            message = f"{name} ({size}) must be divisible by the {shard} ranks of {_SHARD}{of_context}"
            fixes = [*_layouts(run), {name: round_up(size, unit)}]
            yield Violation("hidden_size_divides_among_shards", name, message, tuple(fixes))


def batches_divide_among_ranks(run: Draft) -> Iterator[Violation]:
    """Every global batch size, also within a schedule, is divisible by micro_batch_size x data-parallel ranks."""
    micro, ranks = run[_MICRO], run.layout.data_parallel
    unit = micro * ranks
    of = f"{_MICRO} ({micro}) x data-parallel ranks ({ranks})"
    if schedule := run.get(_SCHEDULE):
        try:
            sizes = [stage.global_batch_size for stage in parse_batch_size_schedule(schedule)]
        except ConfigError:
            raise Unknown(_SCHEDULE) from None
        if wrong := [size for size in sizes if size % unit]:
            message = f"every batch size of {_SCHEDULE} ({', '.join(map(str, wrong))}) must be divisible by {of}"
            mended = with_batch_sizes(schedule, [round_up(size, unit) for size in sizes])
            yield Violation("batches_divide_among_ranks", _SCHEDULE, message, ({_SCHEDULE: mended}, {_MICRO: 1}))
    elif (batch := run[_BATCH]) % unit:
        message = f"{_BATCH} ({batch}) must be divisible by {of}"
        smaller_micro = [d for d in divisors(batch // ranks) if d < micro] if batch % ranks == 0 else []
        fixes = [
            *({_MICRO: size} for size in reversed(smaller_micro)),
            {_BATCH: round_up(batch, unit)},
            *_layouts(run),
        ]
        yield Violation("batches_divide_among_ranks", _BATCH, message, tuple(fixes))


def _ring(run: Draft) -> Fix:
    """Returns the fix that resets the exchange to the ring, which works for any number of ranks."""
    return {name: None for name in (_METHOD, _INNER) if name in run.given}


def _context(run: Draft, degree: int) -> Fix:
    """Returns the fix that sets context to ``degree`` and removes settings that then have no effect."""
    return {_CONTEXT: degree, **(_ring(run) if degree == 1 else {})}


def _layouts(run: Draft) -> tuple[Fix, ...]:
    """Returns other layouts of the same world, or of any world if it is not known, nearest degrees of tensor first.

    They keep pipeline, and context if it divides the ranks of a pipeline stage; otherwise they reset context to 1.
    """
    heads = run.get(_HEADS) or run[_TENSOR]
    context, pipeline, world = run.get(_CONTEXT) or 1, run[_PIPELINE], run.world_size
    if world is not None and world % pipeline:
        return ()  # no layout has this number of stages
    left = None if world is None else world // pipeline
    kept = left is None or left % context == 0
    left = left // context if left is not None and kept else left
    found = _other_layouts(run[_TENSOR], run.get(_SHARD) or -1, bool(run.get(_SEQUENCE)), heads, left)
    return found if kept else tuple({**change, **_context(run, 1)} for change in ({_SHARD: -1}, *found))


@functools.cache  # hundreds for a large world, needed again for every suggestion that is tried
def _other_layouts(tensor: int, shard: int, sequence: bool, heads: int, world: int | None) -> tuple[Fix, ...]:
    found: list[Fix] = []
    for degree in nearest_first(divisors(gcd(heads, world or heads)), tensor):
        change: dict[str, object] = {} if degree == tensor else {_TENSOR: degree}
        if degree == 1 and sequence:
            change[_SEQUENCE] = False
        if change:
            found.append(change)
        if world:
            rest = world // degree
            parts = nearest_first(divisors(rest), shard if shard > 0 else rest)
            found += [change | {_REPLICATE: rest // part, _SHARD: part} for part in parts]
        elif shard > 1:
            found += [change | {_SHARD: part} for part in nearest_first(divisors(shard), shard)]
    return tuple(found)


def _shorter_pipelines(run: Draft) -> Iterator[Fix]:
    """Yields degrees of pipeline that divide the world, alone and with all remaining ranks data parallel."""
    for stages in nearest_first(divisors(run.world_size or 1), run[_PIPELINE]):
        yield {_PIPELINE: stages}
        yield {_PIPELINE: stages, _TENSOR: 1, _SEQUENCE: False, _REPLICATE: 1, _SHARD: -1}


def _hidden_unit(run: Draft, shard: int) -> int:
    """Returns what a hidden size must be a multiple of, so that the head size also stays whole and even."""
    return lcm(shard, 2 * (run.get(_HEADS) or 1))
