"""A small T5 is valid in each of its layouts, small in both stacks, and has stages like the large one."""

import random
from math import prod
from typing import Any

import pytest

from megalith.config import RunConfig, load_run
from megalith.errors import ConfigError
from megalith.insight.verify.cover import AXES
from megalith.insight.verify.stacks import stacks_not_shown
from megalith.training.build_model import stages_of
from megalith.training.tasks.choose import task_of
from tests.insight.verify.test_shrink import small_runs
from tests.training.test_t5_layouts import T5

RECIPE: dict[str, Any] = {
    "data": {"train": "nowhere", "seq_length": 768, "decoder_seq_length": 192},
    "train": {"steps": 10, "global_batch_size": 1152, "micro_batch_size": 2},
    "optim": {"lr": 1e-3},
    "run": "nowhere",
}


def drawn(source: random.Random) -> tuple[RunConfig, int] | None:
    """A T5 with random stacks over random stages, and its number of ranks; None if these contradict each other."""
    one = source.choice
    encoder, decoder = one([1, 3, 6, 24]), one([1, 3, 6, 24])
    parallel: dict[str, Any] = {
        "tensor": one([1, 2, 4]),
        "context": one([1, 2]),
        "pipeline": one([1, 2, 3, 4]),
        "shard": one([1, 2]),
    }
    parallel["sequence"] = parallel["tensor"] > 1
    num_stages, num_layers = parallel["pipeline"], encoder + decoder
    if 1 < num_stages <= num_layers and one([True, False]):
        cuts = sorted(source.sample(range(1, num_layers), num_stages - 1))
        parallel["stage_layers"] = [stop - start for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    model = {**T5, "hidden_size": 64, "num_layers": encoder, "t5": {"num_decoder_layers": decoder}}
    world_size = prod(parallel[axis] for axis in AXES[:5] if axis in parallel)
    try:
        return load_run(RECIPE | {"model": model, "parallel": parallel}, world_size=world_size), world_size
    except ConfigError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_random_stacks_and_stages_are_valid_when_they_are_small(seed):
    source, num_found = random.Random(seed), 0
    while num_found < 40:
        found = drawn(source)
        if found is None:
            continue
        num_found += 1
        large, (alone, runs) = found[0], small_runs(*found)
        stacks = alone.model.num_layers, alone.model.t5.num_decoder_layers
        assert all(1 <= size <= 8 for size in stacks)
        assert sum(stacks) <= 9
        assert alone.data.decoder_seq_length is None
        highest = max((row.get("pipeline", 1) for _, row in runs), default=1)
        for run, row in runs:
            assert run.model == alone.model
            if row.get("pipeline") == highest:
                assert places(large) <= places(run)
            if "pipeline" not in row:
                continue
            listed = large.parallel.stage_layers
            assert (run.parallel.stage_layers is None) == (listed is None)
            if listed is not None and len(set(listed)) > 1:
                assert len(set(run.parallel.stage_layers)) > 1
            elif large.model.total_num_layers % large.parallel.pipeline:
                assert run.model.total_num_layers % row["pipeline"]


def places(run: RunConfig) -> set[str]:
    """Whether the encoder is on several stages, whether the decoder is, and whether a stage has both."""
    encoder = run.model.num_layers
    stages = [range(stage.first, stage.last) for stage in stages_of(run, task_of(run))]
    with_encoder = {number for number, layers in enumerate(stages) if layers[0] < encoder}
    with_decoder = {number for number, layers in enumerate(stages) if layers[-1] >= encoder}
    found = {"encoder": len(with_encoder) > 1, "decoder": len(with_decoder) > 1, "both": with_encoder & with_decoder}
    return {name for name, holds in found.items() if holds}


@pytest.mark.parametrize(
    ("encoder", "decoder", "pipeline", "stage_layers"),
    [
        (9, 7, 2, None),
        (13, 11, 2, None),
        (7, 17, 4, None),
        (13, 11, 4, None),
        (18, 6, 2, None),
        (8, 8, 2, [4, 12]),
        (8, 8, 2, [12, 4]),
        (6, 6, 4, [4, 4, 2, 2]),
        (6, 6, 4, [2, 4, 3, 3]),
    ],
)
def test_small_stacks_lie_on_stages_as_the_large_ones_do(encoder, decoder, pipeline, stage_layers):
    model = {**T5, "hidden_size": 64, "num_layers": encoder, "t5": {"num_decoder_layers": decoder}}
    parallel = {"pipeline": pipeline, "stage_layers": stage_layers}
    large = load_run(RECIPE | {"model": model, "parallel": parallel}, world_size=pipeline)
    runs = small_runs(large, pipeline)[1]
    assert places(large)
    assert places(large) <= places(next(run for run, row in runs if row["pipeline"] == pipeline))


def test_what_two_stages_cannot_show_is_said():
    model = {**T5, "hidden_size": 64, "num_layers": 8, "t5": {"num_decoder_layers": 8}}
    parallel = {"pipeline": 4, "stage_layers": [3, 6, 4, 3]}
    large = load_run(RECIPE | {"model": model, "parallel": parallel}, world_size=4)
    assert places(large) == {"encoder", "decoder", "both"}
    [line] = stacks_not_shown(large, [(row, run) for run, row in small_runs(large, 4)[1]])
    assert line.startswith("pipeline 2: the ")
    assert line.endswith("coder on several stages, as in the recipe, needs more stages")
