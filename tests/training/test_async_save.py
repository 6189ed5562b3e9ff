"""checkpoint.async_save: the same run, whose checkpoints survive errors of training and whose own errors end it."""

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megalith.checkpoint.save
from megalith.config import load_run
from megalith.errors import MegalithError, RankFailedError, StorageError
from megalith.observe.metrics import read_metrics
from megalith.topology.agreement import Attempt, attempt
from megalith.training import callbacks
from megalith.training.dry_run import describe
from megalith.training.evaluation import Evaluation
from megalith.training.loop import Callback, FinishedStep, Outcome
from megalith.training.pretrain import pretrain
from megalith.training.run import Run
from megalith.training.saves import refuse_if_saved
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.outcomes import final_tensors, losses, run_here, saved_step

WRITE = megalith.checkpoint.save._write


class AfterStep(Callback):
    """Calls ``function`` after one step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if run.state.step == self.step:
            self.function()


def wait_for_the_thread() -> None:
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("checkpoint of step") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def error_of(tree: dict[str, Any], write: Any, callback: Callback) -> tuple[str, str]:
    """The error that ends a run on this rank, whose files are written by ``write``."""
    config = load_run(tree, world_size=dist.get_world_size())
    with patch.object(megalith.checkpoint.save, "_write", write):
        try:
            pretrain(config, str, str, RunParts(PretrainGPT(config), callbacks=[callback]))
        except (MegalithError, ZeroDivisionError) as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"replicate": 2}], ids=str)
def test_a_run_that_saves_beside_training_ends_bitwise_as_one_that_waits(parallel, tmp_path):
    world_size = 2 if parallel else 1
    waits = settings(tmp_path, parallel=parallel, train={"steps": 5}, checkpoint={"every": 2}, run=str(tmp_path / "a"))
    beside = {**waits, "checkpoint": {"every": 2, "async_save": True}, "run": str(tmp_path / "b")}
    for tree in (waits, beside):
        assert set(ranks(world_size, run_here, tree, world_size)) == {Outcome.DONE}
    assert saved_step(beside["run"]) == 5
    want, got = final_tensors(waits["run"]), final_tensors(beside["run"])
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert losses(waits["run"]) == losses(beside["run"])
    between = [record["step"] for record in read_metrics(tmp_path / "b") if "between" in record]
    assert between == [3, 5]  # the time that training waited, with the step after it


def fail_on_rank_1(*args: Any) -> Any:
    if dist.get_rank() == 1:
        raise StorageError("the disk is full")
    return WRITE(*args)


def fail_beside_training(tree: dict[str, Any]) -> tuple[str, str]:
    return error_of(tree, fail_on_rank_1, AfterStep(4, wait_for_the_thread))


def test_a_failure_on_one_rank_ends_the_run_before_the_next_save_is_due(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 100}, checkpoint={"every": 3, "async_save": True})
    found = ranks(2, fail_beside_training, tree)
    says = "step 3 was not saved and earlier checkpoints are unchanged: rank 1: the disk is full"
    assert found == [("StorageError", says)] * 2
    assert len(losses(tree["run"])) in (4, 5)  # the step after it was noticed may be done, but not the next save
    assert saved_step(tree["run"]) == 0
    assert set(ranks(2, run_here, {**tree, "train": {**tree["train"], "steps": 4}}, 2)) == {Outcome.DONE}


def test_an_earlier_error_of_the_step_is_not_replaced_by_that_of_a_save(tmp_path):
    config = load_run(settings(tmp_path, checkpoint={"every": 2, "async_save": True}))

    def wait() -> None:
        raise StorageError("the disk is full")

    saver: Any = SimpleNamespace(failed=True, wait=wait)
    run: Any = SimpleNamespace(config=config, state=SimpleNamespace(step=1), pending=Attempt())
    checkpoints = callbacks.Checkpoints(run, Any, saver)
    checkpoints.on_step(run, Any)
    assert str(run.pending.error) == "the disk is full"
    with attempt() as writing:
        raise StorageError("metrics.jsonl cannot be written")
    run.pending = writing
    checkpoints.on_step(run, Any)
    assert run.pending is writing


def fail_in_the_last_save(tree: dict[str, Any]) -> tuple[str, str]:
    return error_of(tree, fail_on_rank_1, AfterStep(4, lambda: None))


def test_a_failure_of_the_last_save_ends_the_run_with_its_error(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 4}, checkpoint={"every": 4, "async_save": True})
    says = "step 4 was not saved and earlier checkpoints are unchanged: rank 1: the disk is full"
    assert ranks(2, fail_in_the_last_save, tree) == [("StorageError", says)] * 2


def run_with_held_out_losses(tree: dict[str, Any], losses: list[float]) -> Outcome:
    found = iter(losses)

    def evaluate(*_: Any, **__: Any) -> Evaluation:
        return Evaluation(loss := next(found), {"lm": loss}, {"lm": 1}, 1, "tokens")

    with patch.object(callbacks, "evaluate", evaluate):
        return pretrain(load_run(tree), str, str)


def test_the_best_checkpoint_is_kept(tmp_path):
    tree = settings(tmp_path, train={"steps": 6, "evaluation": {"every": 2}})
    tree["data"]["valid"] = tree["data"]["train"]
    tree["checkpoint"] = {"every": 2, "keep": 1, "keep_best": True, "async_save": True}
    assert ranks(1, run_with_held_out_losses, tree, [1.0, 3.0, 2.0]) == [Outcome.DONE]
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000006"]
    assert (folder / "best").read_text() == "step-00000002\n"


def fail_while_saving(tree: dict[str, Any]) -> tuple[str, str]:
    """Rank 1 breaks down in step 3 while no rank has written its file of step 2."""
    go = threading.Event()

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return WRITE(*args)

    def break_down() -> None:
        threading.Timer(0.5, go.set).start()
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError("in step 3")
        raise RankFailedError("it was the last rank")  # as the next collective would

    return error_of(tree, write, AfterStep(3, break_down))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_fails_waits_for_the_checkpoint_that_is_being_written(num_ranks, tmp_path):
    parallel = {"replicate": num_ranks}
    tree = settings(tmp_path, parallel=parallel, train={"steps": 9}, checkpoint={"every": 2, "async_save": True})
    found = ranks(num_ranks, fail_while_saving, tree)
    assert found[-1] == ("ZeroDivisionError", "in step 3")
    assert saved_step(tree["run"]) == 2


def stop_while_saving(tree: dict[str, Any]) -> Outcome:
    """SIGTERM arrives in step 3, while nothing of the checkpoint of step 2 is written."""
    config, go = load_run(tree), threading.Event()

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return WRITE(*args)

    def ask() -> None:
        threading.Timer(0.5, go.set).start()
        os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(megalith.checkpoint.save, "_write", write):
        return pretrain(config, str, str, RunParts(PretrainGPT(config), callbacks=[AfterStep(3, ask)]))


def test_a_run_that_is_asked_to_stop_completes_one_checkpoint_and_saves_another(tmp_path):
    tree = settings(tmp_path, train={"steps": 9}, checkpoint={"every": 2, "async_save": True})
    assert ranks(1, stop_while_saving, tree) == [Outcome.STOPPED]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003"]


def test_metrics_past_the_first_save_are_no_proof_that_it_was_complete(tmp_path):
    tree = settings(tmp_path, train={"steps": 9}, checkpoint={"every": 2, "async_save": True})
    ranks(1, run_here, tree, 1)
    run = tmp_path / "run"
    (run / "saved.json").unlink()
    for step in (run / "checkpoints").iterdir():
        step.rename(tmp_path / step.name)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    store = megalith.checkpoint.save.open_store(run / "checkpoints")
    (run / "metrics.jsonl").write_text("".join(lines[:4]))  # killed in the step that begins the second save
    refuse_if_saved(run, store, {})
    (run / "metrics.jsonl").write_text("".join(lines[:5]))  # after it, which waited for the first
    with pytest.raises(MegalithError, match="this run has saved before"):
        refuse_if_saved(run, store, {})


@pytest.mark.parametrize("steps", [3, 4])
def test_a_short_run_that_was_killed_while_it_saved_begins_again(steps, tmp_path):
    tree = settings(tmp_path, train={"steps": steps}, checkpoint={"every": 2, "async_save": True})
    ranks(1, run_here, tree, 1)
    run = tmp_path / "run"
    (run / "saved.json").unlink()
    for step in (run / "checkpoints").iterdir():
        step.rename(tmp_path / step.name)
    refuse_if_saved(run, megalith.checkpoint.save.open_store(run / "checkpoints"), {})


def test_a_dry_run_says_how_much_memory_the_copies_take(tmp_path):
    tree = settings(tmp_path, precision={"dtype": "float32"}, checkpoint={"every": 2, "async_save": True})
    config = load_run(tree)
    [line] = [line for line in describe(config, 1).splitlines() if line.startswith("copy for saving")]
    num_parameters = PretrainGPT(config).num_parameters
    assert line == f"copy for saving       {12 * num_parameters / 1000:.3g}kB on each rank, in CPU memory"
    waits = load_run({**tree, "checkpoint": {"every": 2}})
    assert "copy for saving" not in describe(waits, 1)
