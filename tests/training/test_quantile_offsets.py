"""The offsets of selection=quantile follow the logits of every step of a run, on any ranks, also after a resume."""

from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import load_run
from megalith.topology.agreement import all_gather
from megalith.training.resume import resume_or_load, save
from megalith.training.run import Run
from megalith.training.setup import build_run
from megalith.training.step import local_counts, sum_totals, train_step
from tests.rank_pool import ranks
from tests.tiny_run import settings

E, K, DECAY = 4, 2, 0.5
MODEL = {
    "moe": {"num_experts": E, "top_k": K, "router": {"selection": "quantile", "quantile_decay": DECAY}},
    "num_layers": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"alone": (1, {}), "data 2": (2, {"replicate": 2})}
ROUNDING = 1e-6  # offsets are float32
Offsets = dict[int, list[float]]


def built(tree: dict[str, Any], num_ranks: int) -> Run:
    return build_run(load_run(tree, world_size=num_ranks), torch.device("cpu"))


def step_of(run: Run) -> None:
    consumed, train = run.state.consumed_samples, run.config.train
    micro_batches = run.loader.batch(consumed, run.microbatches.global_batch_size(consumed), train.micro_batch_size)
    train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)


def offsets_of(run: Run) -> Offsets:
    routers = {layer: router for chunk in run.chunks for layer, router in chunk.routers().items()}
    return {layer: router.quantile_offsets.tolist() for layer, router in routers.items()}


def two_steps_saved(tree: dict[str, Any], num_ranks: int) -> tuple[Offsets, list[dict[int, list[Tensor]]]]:
    """The offsets after two steps, and for each step the logits [T, E] of all micro-batches of all ranks, by layer."""
    run, logits = built(tree, num_ranks), []
    for chunk in run.chunks:
        for router in chunk.routers().values():
            router.register_forward_pre_hook(lambda router, args: kept_logits(router, args[0], logits[-1]))
    for _ in range(2):
        logits.append({})
        step_of(run)
    save(run, keep_last=1)
    every = [all_gather(step) for step in logits]
    return offsets_of(run), [{layer: [x for rank in step for x in rank[layer]] for layer in step[0]} for step in every]


def kept_logits(router: Any, x: Tensor, kept: dict[int, list[Tensor]]) -> None:
    kept.setdefault(router.layer, []).append((x.detach().flatten(0, 1) @ router.weight.detach().T).clone())


def read(tree: dict[str, Any], num_ranks: int) -> Offsets:
    run = built(tree, num_ranks)
    resume_or_load(run)
    assert run.state.step == 2
    return offsets_of(run)


def estimate(logits: list[list[float]], offsets: list[float]) -> list[float]:
    """For each expert, the margin over each token's selection threshold that T K / E tokens exceed."""
    margins = []
    for token in logits:
        scores = sorted((z - offset for z, offset in zip(token, offsets, strict=True)), reverse=True)
        border = (scores[K - 1] + scores[K]) / 2
        margins.append([z - border for z in token])
    share = len(logits) * K // E
    return [sorted(column, reverse=True)[share] for column in zip(*margins, strict=True)]


def moved(offsets: list[float], micro_batches: list[Tensor]) -> list[float]:
    estimates = [estimate(logits.tolist(), offsets) for logits in micro_batches]
    means = [mean(of_expert) for of_expert in zip(*estimates, strict=True)]
    return [DECAY * old + (1 - DECAY) * (new - mean(means)) for old, new in zip(offsets, means, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_follow_every_step_and_survive_a_resume(layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, model=MODEL, parallel=parallel)
    written = ranks(num_ranks, two_steps_saved, tree, num_ranks)
    found, logits = written[0]
    assert found.keys() == {0, 1}
    for layer, offsets in found.items():
        assert [len(step[layer]) for step in logits] == [4, 4]  # a batch of 8 samples, 2 at a time
        want = moved(moved([0.0] * E, logits[0][layer]), logits[1][layer])
        assert offsets == pytest.approx(want, rel=0, abs=ROUNDING)
        assert max(map(abs, offsets)) > 100 * ROUNDING
    for num_readers, axes in LAYOUTS.values():
        again = ranks(num_readers, read, {**tree, "parallel": axes}, num_readers)
        assert again == [found] * num_readers
    assert [offsets for offsets, _ in written] == [found] * num_ranks
