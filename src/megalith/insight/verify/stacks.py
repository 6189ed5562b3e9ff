"""How an encoder and a decoder are placed on pipeline stages, and small stacks with the same placement.

Each placement uses different code: encoder hidden states sent between stages, decoder hidden states sent together with
the encoder's, and a stage in which the encoder ends and the decoder begins.
"""

from collections.abc import Iterator, Sequence

from megalith.config import RunConfig
from megalith.insight.verify.cover import Degrees
from megalith.parallel.pipeline.stages import ModelCosts, balanced_stages, listed_stages
from megalith.training.build_model import stages_of
from megalith.training.tasks.choose import task_of

__all__ = ["listed", "places_of_stacks", "small_stacks", "stacks_not_shown"]

_ENCODER, _DECODER, _BOTH = "the encoder on several stages", "the decoder on several stages", "a stage with both stacks"
_USUAL_VOCABULARY = 2**15


def places_of_stacks(config: RunConfig) -> frozenset[str]:
    """Describes how the two stacks are placed on the run's pipeline stages; empty without two stacks.

    Stages are balanced by cost, including the logits. If the vocabulary size is still to be taken from the data,
    ``_USUAL_VOCABULARY`` is assumed.
    """
    if config.model.t5 is None or config.parallel.pipeline == 1:
        return frozenset()
    if config.model.vocab_size is None:
        model = config.model.model_copy(update={"vocab_size": _USUAL_VOCABULARY})
        config = config.model_copy(update={"model": model})
    stages = stages_of(config, task_of(config))
    return _places([range(stage.first, stage.last) for stage in stages], config.model.num_layers)


def small_stacks(
    config: RunConfig, costs: ModelCosts, smallest: int, uneven: bool, num_stages: Sequence[int]
) -> tuple[int, int]:
    """Numbers of layers of a small encoder and decoder, at least ``smallest`` in total, placed as those of ``config``.

    Chooses the best match of the placement, then the fewest layers, then the closest ratio of encoder to decoder.

    Args:
        costs: costs of a small model; its first layer is an encoder layer and its last a decoder layer.
        uneven: none of ``num_stages`` divides the number of layers; otherwise all do.
        num_stages: number of stages of each small pipeline.
    """
    wanted, model, lists = places_of_stacks(config), config.model, config.parallel.stage_layers
    sums = [smallest + more for more in ((0, 2, 4) if uneven else (0, max(num_stages)))]

    def rank(stacks: tuple[int, int]) -> tuple[float, ...]:
        encoder, num_layers = stacks[0], sum(stacks)
        layers = costs.layers[:1] * encoder + costs.layers[-1:] * stacks[1]
        of_model = ModelCosts(layers, costs.embedding, costs.head)
        missing = []
        for number in num_stages:
            given = lists and listed_stages(listed(lists, num_layers, number))
            stages = given or balanced_stages(of_model, number)
            missing.append(wanted - _places(stages, encoder))
        nowhere = frozenset.intersection(*missing)
        off = abs(encoder / num_layers - model.num_layers / model.total_num_layers)
        return len(nowhere), sum(map(len, missing)), num_layers, off

    return min(((first, total - first) for total in sums for first in range(1, total)), key=rank)


def stacks_not_shown(config: RunConfig, small_runs: Sequence[tuple[Degrees, RunConfig]]) -> Iterator[str]:
    """Lines about placements of the stacks of ``config`` that the small runs, given with their degrees, do not have."""
    wanted = places_of_stacks(config)
    missing = {row["pipeline"]: wanted - places_of_stacks(run) for row, run in small_runs if "pipeline" in row}
    for degree, places in sorted(missing.items()):
        if places:
            yield f"pipeline {degree}: {', '.join(sorted(places))}, as in the recipe, needs more stages"


def listed(large: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Distributes ``num_layers`` over ``num_stages``, with the largest stage where ``large`` has it."""
    each, more = divmod(num_layers, num_stages)
    longest = large.index(max(large)) * num_stages // len(large)
    return [each + more * (stage == longest) for stage in range(num_stages)]


def _places(stages: Sequence[range], num_encoder_layers: int) -> frozenset[str]:
    with_encoder = [stage.start < num_encoder_layers for stage in stages]
    with_decoder = [stage.stop > num_encoder_layers for stage in stages]
    both = [one and other for one, other in zip(with_encoder, with_decoder, strict=True)]
    found = {_ENCODER: sum(with_encoder) > 1, _DECODER: sum(with_decoder) > 1, _BOTH: any(both)}
    return frozenset(place for place, holds in found.items() if holds)
