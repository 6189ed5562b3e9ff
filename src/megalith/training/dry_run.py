"""Describes a run without running it: settings, size, memory, and its first batch as text."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from megalith.config import RunConfig, dump_yaml
from megalith.config.layout import Layout
from megalith.errors import ConfigError
from megalith.observe.units import quantity
from megalith.parallel.pipeline.schedules import build_schedule
from megalith.parallel.pipeline.simulate import Costs, simulate
from megalith.training.build_model import stages_of
from megalith.training.exchange_sizes import symmetric_sizes
from megalith.training.machine_fit import StateBytes, copy_bytes, rank_state_bytes, state_bytes
from megalith.training.memory import planned_memory
from megalith.training.planned_data import planned_data, planned_samples
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.task import AnyTask
from megalith.training.traffic import busiest_rank

__all__ = ["describe"]

_ALWAYS = ("tensor", "replicate", "shard")  # axes that are shown even if they have one rank


def describe(config: RunConfig, world_size: int) -> str:
    """Returns several lines for the user: the resolved settings, then what they imply."""
    task = task_of(config)
    flops = task.flops_per_sample / task.tokens_per_sample
    layout = config.parallel.layout(world_size)
    degrees = {name: getattr(layout, name) for name in ("tensor", "context", "pipeline", "replicate", "shard")}
    axes = {name: degree for name, degree in degrees.items() if name in _ALWAYS or degree > 1}
    state = state_bytes(config, task.num_parameters).total
    held = rank_state_bytes(config, task, world_size)
    largest = max(each.total for each in held)
    share = f"{'up to' if layout.pipeline > 1 else 'about'} {quantity(largest)}B"
    dataset, num_samples = task.train_dataset(), planned_samples(config, layout.data_parallel)
    tokens = config.train.global_batch_size * task.tokens_per_sample
    return "\n".join(
        [
            dump_yaml(config).rstrip(),
            "",
            f"parameters            {task.num_parameters:,}{_active(task)}",
            f"ranks                 {world_size} = {' x '.join(f'{name} {degree}' for name, degree in axes.items())}",
            *_experts(task, layout),
            *_stages(config, task, layout),
            f"state on each rank    {share} of {quantity(state)}B",
            *_buffers(config),
            *_copies(config, held, world_size),
            f"peak memory           {_memory(config, task, world_size)}",
            f"tokens per step       {tokens:,}, {num_samples * task.tokens_per_sample:,} in total",
            *planned_data(dataset, num_samples),
            f"FLOPs per token       {quantity(flops)}",
            *_exchanged(config, task, world_size),
            f"first sample          the text, with [{task.in_brackets}] in brackets:",
            *task.sample_as_text(dataset[0]),
        ]
    )


def _active(task: AnyTask) -> str:
    """Formats how many parameters are active per token, if not all of them are."""
    if not task.num_expert_parameters:
        return ""
    moe = next(iter(task.routed_layers.values()))
    idle = task.num_expert_parameters * (moe.num_experts - moe.top_k) // moe.num_experts
    return f", {task.num_parameters - idle:,} of them active per token"


def _experts(task: AnyTask, layout: Layout) -> list[str]:
    """Formats the grid of expert ranks, which are the ranks of a stage arranged differently."""
    if not task.num_expert_parameters:
        return []
    degrees = {
        "expert": layout.expert,
        "expert tensor": layout.expert_tensor,
        "replicate": layout.edp_replicate,
        "shard": layout.edp_shard,
    }
    axes = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    return [
        f"expert ranks          {prod(degrees.values())} = {axes}, holding {task.num_expert_parameters:,} parameters"
    ]


def _buffers(config: RunConfig) -> list[str]:
    """Formats the size of each rank's token exchange buffers, which are not part of its state, if it is known."""
    if (sizes := symmetric_sizes(config)) is not None:
        return [f"exchange buffers      {quantity(sizes.num_bytes)}B on each rank, in symmetric memory"]
    if config.parallel.dispatch.method == "flex":
        return ["exchange buffers      DeepEP's own, not counted"]
    return []


def _copies(config: RunConfig, held: Sequence[StateBytes], world_size: int) -> list[str]:
    """Formats the size of a rank's copies for saving while training continues, which are not part of its peak."""
    if (copied := max(copy_bytes(config, each, world_size) for each in held)) == 0:
        return []
    return [f"copy for saving       {quantity(copied)}B on each rank, in CPU memory"]


def _memory(config: RunConfig, task: AnyTask, world_size: int) -> str:
    """Formats the memory of the rank that needs the most, without the libraries' own."""
    try:
        return f"about {planned_memory(config, task, world_size)}, plus what torch itself takes"
    except ConfigError as error:
        return f"not counted: {error}"


def _stages(config: RunConfig, task: AnyTask, layout: Layout) -> list[str]:
    """Formats the layers of each stage, and the pipeline bubble at the last batch size, estimated from FLOPs."""
    parallel, parts = config.parallel, task.costs() if layout.pipeline > 1 else None
    if parts is None:
        return []
    stages = stages_of(config, task)
    forward = [sum(parts.layers[stage.first : stage.last]) for stage in stages]
    forward[0] += parts.embedding
    forward[-1] += parts.head
    num_microbatches = config.train.global_batch_size // (config.train.micro_batch_size * layout.data_parallel)
    schedule = build_schedule(parallel.schedule, parallel.pipeline, num_microbatches, parallel.virtual)
    costs = [Costs(forward=cost, backward_input=cost, backward_weight=cost) for cost in forward]
    bubble = simulate(schedule, costs).bubble
    layers = " + ".join(str(len(stage.layers)) for stage in stages)
    return [
        f"stages                {layers} layers, {parallel.schedule}: bubble {bubble:.0%} of the compute time, "
        "estimated from FLOPs"
    ]


def _exchanged(config: RunConfig, task: AnyTask, world_size: int) -> list[str]:
    """Formats a line per axis: the number of collectives of each kind, and their total bytes."""
    try:
        rank, traffic = busiest_rank(config, task, world_size)
    except ConfigError as error:
        return [f"traffic per step      not counted: {error}"]
    times, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each, number in traffic.items():
        times[each.axis, each.kind] += number
        sizes[each.axis, each.kind] += number * each.num_bytes
    axes: dict[str, list[str]] = {}
    for (axis, kind), number in sorted(times.items()):
        axes.setdefault(axis, []).append(f"{number:,} {kind} of {quantity(sizes[axis, kind])}B")
    lines = [f"  {axis:<20}{', '.join(kinds)}" for axis, kinds in axes.items()]
    given = ", with balanced experts" if task.routed_layers else ""
    if task.usual_labels is not None and config.parallel.tensor > 1:
        given += f", with {task.usual_labels:,} predicted tokens per micro-batch"
    heading = f"traffic per step      of rank {rank}, the busiest{given}; sizes are totals:"
    return [heading, *lines] if lines else []
