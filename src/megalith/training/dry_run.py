"""What a run would do, without doing it: settings, size, memory, and its first batch as text."""

from megalith.config import RunConfig, dump_yaml
from megalith.observe.units import quantity
from megalith.training.machine_fit import state_bytes
from megalith.training.tasks.choose import task_of

__all__ = ["describe"]


def describe(config: RunConfig, world_size: int) -> str:
    """Several lines for a person: the resolved settings, then what they mean."""
    task = task_of(config)
    flops = task.flops_per_sample / task.tokens_per_sample
    layout = config.parallel.layout(world_size)
    axes = {"tensor": layout.tensor, "replicate": layout.replicate, "shard": layout.shard}
    if layout.context > 1:
        axes = {"tensor": layout.tensor, "context": layout.context, **axes}
    state = state_bytes(config, task.num_parameters)
    tokens = config.train.global_batch_size * task.tokens_per_sample
    return "\n".join(
        [
            dump_yaml(config).rstrip(),
            "",
            f"parameters            {task.num_parameters:,}",
            f"ranks                 {world_size} = {' x '.join(f'{name} {degree}' for name, degree in axes.items())}",
            f"state on each rank    about {quantity(state * layout.replicate / world_size)}B of {quantity(state)}B",
            f"tokens in a step      {tokens:,}, in all {tokens * config.train.steps:,}",
            f"operations per token  {quantity(flops)}",
            "first sample          the text, with [what no loss is taken on] in brackets:",
            *task.sample_as_text(task.train_dataset()[0]),
        ]
    )
