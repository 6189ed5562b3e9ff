"""Counts what a rank exchanges in one training step, from the settings; excludes evaluation and checkpoints.

    task        forwards and backwards of micro-batches, over tensor and context; tokens to experts and back, over
                expert and expert_tensor, assuming even loads
    FSDP2       weights and gradients, over shard x context and replicate; partial gradients, over tensor; gradients of
                experts, over the ranks that hold the same ones
    pipeline    hidden states to the next stage, their gradients to the previous one; the sum of tied weights' gradients
    step        its two small all-reduces, over all ranks; samples that are compared with each other (``JointTask``) run
                forward twice if there are several micro-batches

Recomputation is counted as in eager PyTorch; train.compile may keep other tensors for the backward.
"""

from collections.abc import Sequence

from megalith.config import RunConfig
from megalith.parallel.sharding.traffic import Sharding
from megalith.parallel.traffic import Traffic, collective, enlarged, repeated
from megalith.topology.rank_grid import RankGrid
from megalith.training.build_model import DTYPES, param_dtype, placement_of_run, stages_of
from megalith.training.routing import num_routing_sums
from megalith.training.tasks.task import AnyTask, JointTask, StageTraffic

__all__ = ["busiest_rank", "step_traffic"]


def step_traffic(
    config: RunConfig, task: AnyTask, world_size: int, rank: int, labels: Sequence[int] | None = None
) -> Traffic:
    """Counts what ``rank`` exchanges in a step at the run's last batch size.

    Args:
        labels: how many tokens the rank predicts in each micro-batch, if that depends on the text, as for masked
            tokens; by default the ``usual_labels`` of ``task``.

    Raises:
        ConfigError: ``task`` does not count what its model exchanges, or its model cannot be split into stages.
    """
    layout = config.parallel.layout(world_size)
    grid = RankGrid(layout)
    sharding = Sharding(layout, grid.position("tp", rank), DTYPES[config.precision.dtype], param_dtype(config))
    num_microbatches = config.train.global_batch_size // (config.train.micro_batch_size * layout.data_parallel)
    placement, pp_rank = placement_of_run(config), grid.position("pp", rank)
    stages = stages_of(config, task) if placement.num_stages > 1 else [None]
    num_terms = len(task.terms)
    goes_ahead = isinstance(task, JointTask) and num_microbatches > 1
    # int64 counts, stops, failures; float64 sums, squared norm, router statistics: training/step.py
    found = collective("world", "all_reduce", (num_terms + 2) * 8, world_size)
    num_sums = num_terms + 1 + num_routing_sums(task.routed_layers)
    found += collective("world", "all_reduce", num_sums * 8, world_size)
    counted = [task.traffic(layout, stage) for stage in stages]
    labels = [task.usual_labels or 0] * num_microbatches if labels is None else labels
    for chunk in range(placement.num_chunks):
        stage = counted[placement.stage(pp_rank, chunk)]
        neighbours = placement.previous(pp_rank, chunk), placement.next(pp_rank, chunk)
        is_elsewhere = [place is not None and place[0] != pp_rank for place in neighbours]
        num_sent = (sum(is_elsewhere) + goes_ahead * is_elsewhere[1]) * num_microbatches
        found += repeated(stage.micro_batch, num_microbatches) + stage.per_step
        found += repeated(stage.forward, num_microbatches * goes_ahead)
        for number in labels:
            found += enlarged(stage.per_label, number)
        found += collective("pipeline", "send", stage.hidden_bytes, layout.pipeline, num_sent)
        found += _fsdp(stage, sharding, num_microbatches, in_pipeline=placement.num_stages > 1, goes_ahead=goes_ahead)
    held = [counted[placement.stage(pp_rank, chunk)].shared for chunk in range(placement.num_chunks)]
    for name, weight in {name: weight for shared in held for name, weight in shared.items()}.items():
        # stages on the same rank, such as the first and the last of a V schedule, share the weight locally
        holding = {placement.place(number)[0] for number, stage in enumerate(counted) if name in stage.shared}
        shard = sharding.shard_bytes(weight, grid.position("dp_shard-cp", rank))
        found += collective("pipeline", "all_reduce", shard, len(holding))
    return found


def busiest_rank(config: RunConfig, task: AnyTask, world_size: int) -> tuple[int, Traffic]:
    """Returns the first of the ranks that exchange the most bytes, and its ``step_traffic``."""
    # traffic differs by stage; within a stage, the first rank has the largest part of what is split unevenly
    firsts = RankGrid(config.parallel.layout(world_size)).group_of("pp", 0)
    found = {rank: step_traffic(config, task, world_size, rank) for rank in firsts}
    return max(found.items(), key=lambda item: sum(each.num_bytes * times for each, times in item[1].items()))


def _fsdp(
    stage: StageTraffic, sharding: Sharding, num_microbatches: int, *, in_pipeline: bool, goes_ahead: bool
) -> Traffic:
    """Counts the FSDP2 traffic of a stage; ``goes_ahead``: it runs forward twice.

    A pipeline stage is gathered once per pass over the micro-batches; a whole model once per micro-batch, all units but
    the last twice. A pass without backwards gathers those once per micro-batch, and the last unit and the rest once.
    """
    gathers = 1 if in_pipeline else num_microbatches
    found = sharding.unit_traffic(stage.rest, gathers + goes_ahead)
    for number, unit in enumerate(stage.units):
        freed = not in_pipeline and sharding.num_shards > 1 and number + 1 < len(stage.units)
        traffic = sharding.expert_unit_traffic if number in stage.expert_units else sharding.unit_traffic
        ahead = goes_ahead * (num_microbatches if freed else 1)
        found += traffic(unit, ahead + (2 * gathers if freed else gathers))
    return found
