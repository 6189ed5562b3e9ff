"""A small T5 is valid in each of its layouts, small in both of its stacks, and has stages as the large one has."""

import random
from math import prod
from typing import Any

import pytest

from megalith.config import RunConfig, load_run
from megalith.errors import ConfigError
from megalith.insight.verify.cover import AXES
from tests.insight.verify.test_shrink import small_runs
from tests.training.test_t5_layouts import T5

RECIPE: dict[str, Any] = {
    "data": {"train": "nowhere", "seq_length": 768, "decoder_seq_length": 192},
    "train": {"steps": 10, "global_batch_size": 1152, "micro_batch_size": 2},
    "optim": {"lr": 1e-3},
    "run": "nowhere",
}


def drawn(source: random.Random) -> tuple[RunConfig, int] | None:
    """A T5 of random stacks over random stages, and its ranks; None where they contradict each other."""
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
        for run, row in runs:
            assert run.model == alone.model
            if "pipeline" not in row:
                continue
            listed = large.parallel.stage_layers
            assert (run.parallel.stage_layers is None) == (listed is None)
            if listed is not None and len(set(listed)) > 1:
                assert len(set(run.parallel.stage_layers)) > 1
            elif large.model.total_num_layers % large.parallel.pipeline:
                assert run.model.total_num_layers % row["pipeline"]


def test_a_stack_on_several_stages_stays_there():
    model = {**T5, "num_layers": 18, "t5": {"num_decoder_layers": 6}}
    large = load_run(RECIPE | {"model": model, "parallel": {"pipeline": 2}}, world_size=2)
    [(small, _)] = small_runs(large, 2)[1]
    assert (small.model.num_layers, small.model.t5.num_decoder_layers) == (3, 1)
