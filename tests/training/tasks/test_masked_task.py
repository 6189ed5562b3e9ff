"""What encoders and T5 share: dropout of each token of a step, and what depends on the run's seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.masked_task import MaskedTask
from megalith.training.tasks.pretrain_t5 import PretrainT5
from tests.rank_pool import ranks
from tests.tiny_masked import SEQ, masked_settings
from tests.training.outcomes import losses, run_here
from tests.training.tasks.test_finetune_classification import labelled_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings

SETTINGS = {"bert": masked_settings, "classification": labelled_settings, "t5": t5_settings}
CPU = torch.device("cpu")


def task_with_seed(kind: str, folder: Path, seed: int) -> MaskedTask[Any, Any, Any]:
    task = task_of(load_run(SETTINGS[kind](folder, train={"seed": seed})))
    assert isinstance(task, MaskedTask)
    return task


def row_length(task: MaskedTask[Any, Any, Any]) -> int:
    """Of the encoder's row, and of the decoder's after it."""
    return SEQ + task.decoder_seq_length if isinstance(task, PretrainT5) else SEQ


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_token_of_every_step_has_its_own_dropout(kind, tmp_path):
    task = task_with_seed(kind, tmp_path, 7)
    dataset, S = task.train_dataset(), row_length(task)
    micro_batches = [task.collate([dataset[row] for row in rows], rows) for rows in (range(3), range(3, 6))]
    for step in (0, 5):
        keys = [task.inputs(batch, step, CPU).dropout_key for batch in micro_batches]
        assert {(key.seed, key.step) for key in keys} == {(7, step)}
        # row * S + position, the decoder's positions after the encoder's
        assert torch.equal(torch.cat([key.tokens for key in keys]), torch.arange(6 * S).view(6, S))


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_ranks_of_a_row_drop_what_one_process_drops(kind, tmp_path):
    task = task_with_seed(kind, tmp_path, 7)
    dataset, rows = task.train_dataset(), range(4, 6)
    whole = task.collate([dataset[row] for row in rows], rows)
    want = task.inputs(whole, 3, CPU).dropout_key
    lengths = [SEQ, row_length(task) - SEQ]
    for rank in range(2):
        found = task.inputs(task.context_part(whole, rank, 2), 3, CPU).dropout_key
        columns = [zigzag_positions(S, 2, rank) for S in lengths if S]
        columns[1:] = [SEQ + each for each in columns[1:]]
        assert (found.seed, found.step) == (want.seed, want.step)
        assert torch.equal(found.tokens, want.tokens[:, torch.cat(columns)])


def train_here(tree: dict[str, Any], world_size: int) -> None:
    run_here(tree, world_size)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_stopped_goes_on_in_another_layout(kind, tmp_path):
    tree = SETTINGS[kind](tmp_path / "text")
    two, four = ({**tree, "train": {**tree["train"], "steps": steps}} for steps in (2, 4))
    ranks(1, train_here, {**four, "run": str(tmp_path / "alone")}, 1)
    stopped = {"run": str(tmp_path / "stopped")}
    ranks(2, train_here, {**two, **stopped, "parallel": {"context": 2}}, 2)
    ranks(1, train_here, {**four, **stopped}, 1)
    want = losses(tmp_path / "alone")
    assert len(want) == 4
    assert losses(tmp_path / "stopped") == pytest.approx(want, rel=LAYOUT_FLOAT64, abs=0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_runs_with_other_seeds_begin_with_other_samples(kind, tmp_path):
    datasets = (task_with_seed(kind, tmp_path, seed).train_dataset() for seed in (1, 1, 2))
    first, again, other = ([dataset[number].tokens.tolist() for number in range(4)] for dataset in datasets)
    assert first == again != other


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_samples_of_several_datasets_are_drawn_by_their_weights(kind, tmp_path):
    trees = [SETTINGS[kind](tmp_path / name, train={"seed": 3}) for name in ("one", "other")]
    one, other = (task_of(load_run(tree)).train_dataset() for tree in trees)
    data = {
        **trees[0]["data"],
        "train": {name: tree["data"]["train"] for name, tree in zip("ab", trees, strict=True)},
        "weights": {"a": 2, "b": 1},
    }
    found = task_of(load_run({**trees[0], "data": data})).train_dataset()
    for index, want in enumerate((one[0], other[0], one[1], one[2], other[1], one[3])):
        assert found[index].tokens.tolist() == want.tokens.tolist()
    epochs = found.progress(300)
    assert [epochs["a"]["epochs"], epochs["b"]["epochs"]] == [200 / one.num_samples, 100 / other.num_samples]


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_is_held_out_is_the_same_whatever_the_seed(kind, tmp_path):
    one, other = (task_with_seed(kind, tmp_path, seed) for seed in (1, 2))
    prefix = one.config.data.train
    one_set, other_set = one.evaluation_dataset(prefix), other.evaluation_dataset(prefix)
    assert len(one_set) == len(other_set)
    assert all((one_set[number].tokens == other_set[number].tokens).all() for number in range(len(one_set)))
