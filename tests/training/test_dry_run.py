"""dry_run: what a run would do, with numbers computed by hand."""

import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.observe.units import quantity
from megalith.parallel.pipeline.plan import Schedule
from megalith.training import dry_run
from megalith.training.dry_run import describe
from megalith.training.preflight import build_schedule, preflight
from tests.program import here, write_settings
from tests.tiny_run import settings


@pytest.fixture(autouse=True)
def without_memory(monkeypatch):
    """Skips the memory estimate, which test_memory.py tests: it takes seconds and does not affect these numbers."""
    monkeypatch.setattr(dry_run, "_memory", lambda *_: "not counted")


def test_the_layout_and_the_state_of_a_rank_are_those_of_the_world(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2, "replicate": 2}, precision={"dtype": "float32"})
    text = describe(load_run(tree, world_size=8), 8)
    assert re.search(r"ranks +8 = tensor 2 x replicate 2 x shard 2\n", text)
    # embedding and head 2 x 61 x 32; each of 2 layers: qkv 32 x (32 + 2 x 16), out 32 x 32, mlp 3 x 32 x 48, 2 norms;
    # a last norm
    num_parameters = 2 * 61 * 32 + 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert re.search(rf"parameters +{num_parameters:,}\n", text)
    # weights, gradients and two moments of 4 bytes each, over 2 x 2 ranks
    assert 16 * num_parameters == 310_784
    assert re.search(r"state on each rank +about 77.7kB of 311kB\n", text)


def test_ranks_that_share_a_sequence_share_the_state_too(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2, "context": 2, "replicate": 2}, precision={"dtype": "float32"})
    text = describe(load_run(tree, world_size=8), 8)
    assert re.search(r"ranks +8 = tensor 2 x context 2 x replicate 2 x shard 1\n", text)
    assert re.search(r"state on each rank +about 77.7kB of 311kB\n", text)


def test_the_state_is_that_of_the_largest_stage(tmp_path):
    tree = settings(tmp_path, parallel={"pipeline": 2, "shard": 2}, precision={"dtype": "float32"})
    text = describe(load_run(tree, world_size=4), 4)
    # the last of two stages: a layer, the last norm, the head; 16 bytes each, over 2 ranks
    num_parameters = 32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 32 + 61 * 32
    assert 16 * num_parameters // 2 == 77_824
    assert re.search(r"state on each rank +up to 77.8kB of 311kB\n", text)
    tied = {**tree, "model": {**tree["model"], "tie_word_embeddings": True}}
    # one process has one embedding, but both stages hold a copy
    assert re.search(r"state on each rank +up to 77.8kB of 280kB\n", describe(load_run(tied, world_size=4), 4))


def test_the_layers_of_each_stage_and_the_bubble_are_told(tmp_path):
    model = {"num_layers": 5, "hidden_size": 32, "vocab_size": 509}
    train = {"global_batch_size": 8, "micro_batch_size": 1}
    text = describe(load_run(settings(tmp_path, parallel={"pipeline": 2}, model=model, train=train), world_size=2), 2)
    assert re.search(r"ranks +2 = tensor 1 x pipeline 2 x replicate 1 x shard 1\n", text)
    layer = 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48) + 2 * 32 * 16
    first, last, m = 3 * layer, 2 * layer + 2 * 509 * 32, 8
    # once the last stage has begun it is never idle, and the first ends with a backward of its own
    idle = 2 * (m * last + first) - m * (first + last)
    assert re.search(rf"stages +3 \+ 2 layers, 1f1b: bubble {idle / m / (first + last):.0%} of the compute time", text)
    assert "stages" not in describe(load_run(settings(tmp_path), world_size=1), 1)


def test_what_the_busiest_rank_exchanges_is_told_by_axis(tmp_path):
    parallel = {"tensor": 2, "sequence": True, "pipeline": 2, "stage_layers": [1, 2]}
    model = {"num_layers": 3, "hidden_size": 32, "vocab_size": 512}
    tree = settings(tmp_path, parallel=parallel, model=model, precision={"dtype": "float32"})
    text = describe(load_run(tree, world_size=4), 4)
    # 4 micro-batches of [16, 2, 32] in float32: two layers have 4 all-gathers and as many reduce-scatters each, the
    # head has one of both; the loss gathers 3 numbers of 32 tokens from both ranks; 5 norms are summed
    hidden, m = 16 * 2 * 32 * 4, 4
    assert "traffic per step      of rank 2, the busiest; sizes are totals:\n" in text
    gathered = quantity(m * (9 * hidden + 2 * 3 * 32 * 4))
    summed = f"5 all_reduce of {5 * 32 * 4}B, {m * 9} reduce_scatter of {quantity(m * 9 * hidden)}B"
    assert re.search(rf"  pipeline +{m} send of {quantity(m * hidden // 2)}B\n", text)
    assert re.search(rf"  tensor +{m * 10} all_gather of {gathered}B, {summed}\n", text)
    assert re.search(r"  world +2 all_reduce of 40B\n", text)


def test_one_rank_exchanges_nothing(tmp_path):
    assert "exchanged" not in describe(load_run(settings(tmp_path), world_size=1), 1)


def without_a_forward(*arguments: Any) -> Schedule:
    schedule = build_schedule(*arguments)
    return replace(schedule, plans=(schedule.plans[0][1:], *schedule.plans[1:]))


def test_a_schedule_that_is_not_sound_is_refused_before_any_rank_starts(tmp_path, monkeypatch):
    tree = settings(tmp_path, parallel={"pipeline": 2})
    preflight(tree, [], 2)
    monkeypatch.setattr("megalith.training.preflight.build_schedule", without_a_forward)
    with pytest.raises(ConfigError, match=r"rank 0 .* micro-batch 0"):
        preflight(tree, [], 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ctrl_c_ends_it_and_promises_no_checkpoint(num_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "describe", lambda *_: signal.raise_signal(signal.SIGINT))
    found = here("train", write_settings(settings(tmp_path), tmp_path), "--dry-run", "--nproc", num_ranks)
    assert found.code == 130
    assert "saving" not in found.out + found.err
