"""Whether a step's numbers are usable, decided together on all ranks."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run, read_tree
from megalith.errors import NonFiniteError
from megalith.numerics.tolerance import NOISE_FLOAT32, gradient_error
from megalith.observe.metrics import read_metrics
from megalith.training.pretrain import pretrain
from megalith.training.run import Run
from megalith.training.setup import build_run
from megalith.training.step import StepResult, local_counts, sum_totals, train_step
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.tiny_run import SEQ, settings
from tests.training.on_ranks import first_steps

BAD_RANK, BAD_STEP = 1, 1


def one_step(run: Run) -> StepResult:
    consumed = run.state.consumed_samples
    sizes = run.microbatches.global_batch_size(consumed), run.config.train.micro_batch_size
    micro_batches = run.loader.batch(consumed, *sizes)
    return train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)


def kept_by_a_skip(run: Run) -> list[torch.Tensor]:
    """Weights and the routers' expert biases."""
    biases = [router.e_score_correction_bias for chunk in run.chunks for router in chunk.routers().values()]
    return [*(p.to_local() for p in run.parameters()), *(bias for bias in biases if bias is not None)]


def steps_with_a_nan(tree: dict[str, Any]) -> tuple[str, list[bool], list[float], bool]:
    """Three steps, the second with a NaN on one rank: error, skipped steps, rates, whether weights were kept."""
    run = build_run(load_run(tree, world_size=2), torch.device("cpu"))
    sums = run.task.sums

    def poisoned(output: torch.Tensor, inputs: Any) -> dict[str, torch.Tensor]:
        bad = run.state.step == BAD_STEP and torch.distributed.get_rank() == BAD_RANK
        return {name: value * (float("nan") if bad else 1.0) for name, value in sums(output, inputs).items()}

    skipped, rates, kept = [], [], False
    with patch.object(run.task, "sums", poisoned):
        try:
            for _ in range(3):
                before = [tensor.clone() for tensor in kept_by_a_skip(run)]
                result = one_step(run)
                skipped.append(result.skipped)
                rates.append(result.lr)
                if result.skipped:
                    kept = all(torch.equal(now, b) for now, b in zip(kept_by_a_skip(run), before, strict=True))
        except NonFiniteError as error:
            return str(error), skipped, rates, kept
    return "", skipped, rates, kept


WARMING_UP = {"schedule": "linear", "warmup_steps": 3}


def test_a_nan_on_one_rank_stops_all_ranks_and_names_parameters_and_rank(tmp_path):
    for message, skipped, _, _ in ranks(2, steps_with_a_nan, settings(tmp_path, parallel={"shard": 2})):
        assert skipped == [False]
        assert "step 2: loss nan" in message
        assert "model.layers.0" in message or "lm_head.weight" in message
        assert "train.nonfinite=skip" in message


EXPERT_BIAS = {"moe": {"num_experts": 4, "router": {"score_function": "sigmoid", "expert_bias_update_rate": 0.05}}}


@pytest.mark.parametrize(("parallel", "model"), [({"shard": 2}, EXPERT_BIAS), ({"tensor": 2}, {})], ids=str)
def test_a_step_with_a_nan_is_skipped_by_all_ranks_with_weights_and_rate_as_they_were(parallel, model, tmp_path):
    tree = settings(tmp_path, parallel=parallel, model=model, train={"nonfinite": "skip"}, optim=WARMING_UP)
    for message, skipped, rates, kept in ranks(2, steps_with_a_nan, tree):
        assert message == ""
        assert skipped == [False, True, False]
        assert kept
        assert rates[1] == rates[2] > rates[0]


def overflow_then_recover(tree: dict[str, Any]) -> tuple[list[bool], list[float], list[float]]:
    run = build_run(load_run(tree), torch.device("cpu"))
    skipped, scales, losses = [], [], []
    for _ in range(12):
        result = one_step(run)
        skipped.append(result.skipped)
        scales.append(run.loss_scale.scale)
        losses.append(result.loss)
    return skipped, scales, losses


def test_float16_recovers_from_an_overflow_by_halving_its_scale(tmp_path):
    precision = {"dtype": "float16", "loss_scale": {"initial": 2.0**21, "hysteresis": 1, "window": 100}}
    [(skipped, scales, losses)] = ranks(1, overflow_then_recover, settings(tmp_path, precision=precision))
    overflows = sum(skipped)
    assert 1 <= overflows < 12
    assert skipped == [True] * overflows + [False] * (12 - overflows)
    assert scales[-1] == 2.0 ** (21 - overflows)
    assert losses[-1] < losses[0]


def test_gradients_of_balance_losses_do_not_depend_on_the_loss_scale(tmp_path):
    moe, found = {"num_experts": 4, "router": {"sequence_balance": 10.0}}, []
    for scale in (2.0**4, 2.0**10):
        precision = {"dtype": "float16", "loss_scale": {"initial": scale}}
        [steps] = ranks(1, first_steps, settings(tmp_path, model={"moe": moe}, precision=precision), 1, 1)
        found.append(steps.gradients[0]["model.layers.1.mlp.gate.weight"])
    # the rounding of float16 is 2^-11 of a number; the smaller scale loses bits of numbers below 2^-14
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2 * found[1].abs().max().item())


# the rounding is 2^-24, 2^-8, 2^-11 of a number; losses here are about 4, and means of 100 tokens
NARROW = [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 2e-3)]
OVER = [(1, {}), (2, {"tensor": 2, "sequence": True}), (2, {"shard": 2})]
STAGES = [(2, {"pipeline": 2}), (4, {"pipeline": 2, "virtual": 2, "tensor": 2, "sequence": True})]


@pytest.mark.parametrize(
    ("narrow", "over"),
    [
        *sampled([*product(NARROW, OVER)]),
        *(pytest.param(*each, id="-".join(map(str, each)), marks=pytest.mark.slow) for each in product(NARROW, STAGES)),
    ],
)
def test_narrow_dtypes_learn_what_float64_does(narrow, over, tmp_path):
    (dtype, tolerance), (world_size, parallel) = narrow, over
    tree = settings(tmp_path, model={"num_layers": 5, "tie_word_embeddings": True})
    want = ranks(1, first_steps, tree, 1)[0]
    all_norm = torch.stack([gradient.norm() for gradient in want.gradients[0].values()]).norm().item()
    tree |= {"parallel": parallel, "precision": {"dtype": dtype}}
    for found in ranks(world_size, first_steps, tree, world_size):
        assert found.losses == pytest.approx(want.losses, abs=4 * tolerance)
        for name, gradient in want.gradients[0].items():
            assert gradient_error(found.gradients[0][name], gradient, all_norm, NOISE_FLOAT32) < tolerance, name


def test_the_same_batch_cut_into_other_micro_batches_gives_the_same_gradient(tmp_path):
    cuts = [ranks(1, first_steps, settings(tmp_path, train={"micro_batch_size": b}), 1)[0] for b in (8, 4, 1)]
    for cut in cuts[1:]:
        for name, gradient in cuts[0].gradients[0].items():
            torch.testing.assert_close(cut.gradients[0][name], gradient, rtol=1e-9, atol=1e-15)


def twice(tree: dict[str, Any]) -> bool:
    first, second = first_steps(tree, 2), first_steps(tree, 2)
    return all(torch.equal(first.final[name], tensor) for name, tensor in second.final.items())


def test_deterministic_mode_gives_the_same_bits_twice(tmp_path):
    tree = settings(tmp_path, train={"deterministic": True}, parallel={"tensor": 2}, precision={"dtype": "float32"})
    assert all(ranks(2, twice, tree))


def test_the_resolved_settings_that_a_run_writes_are_settings_of_a_run(tmp_path):
    tree = settings(tmp_path)
    ranks(1, train, tree)
    ranks(1, train, {**read_tree(Path(tree["run"], "config.yaml")), "run": str(tmp_path / "again")})
    first, again = (Path(tmp_path, name, "config.yaml").read_text() for name in ("run", "again"))
    assert first.replace(str(tmp_path / "run"), str(tmp_path / "again")) == again


def train(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree), str, str)


def test_the_rate_and_batch_size_follow_their_schedules_over_a_run(tmp_path):
    tree = settings(
        tmp_path,
        train={"steps": 6, "batch_size_schedule": "0:4 8:8", "micro_batch_size": 2},
        optim={"schedule": "WSD", "warmup_steps": 2, "wsd": {"decay_steps": 2, "decay_style": "linear"}},
    )
    del tree["train"]["global_batch_size"]
    ranks(1, train, tree)
    records = read_metrics(Path(tree["run"]))
    assert [record["consumed_samples"] for record in records] == [4, 8, 16, 24, 32, 40]
    assert [record["lr"] for record in records] == pytest.approx([0.0, 5e-4, 1e-3, 1e-3, 1e-3, 5e-4])


def test_tokens_per_second_counts_tokens_without_a_loss_too(tmp_path):
    tree = settings(tmp_path, train={"steps": 2})  # ends of documents have no loss there
    ranks(1, train, tree)
    for record in read_metrics(Path(tree["run"])):
        assert record["tokens"] == record["consumed_samples"] * SEQ
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(8 * SEQ)
