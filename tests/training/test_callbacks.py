"""callbacks: speed and multi-term losses in records, by hand; errors on rank 0 alone reach all ranks."""

import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith import optional
from megalith.checkpoint.save import save_checkpoint
from megalith.config import load_run
from megalith.data.gpt_dataset import EvaluationDataset
from megalith.errors import DataError, StorageError
from megalith.observe.metrics import MetricsWriter, read_metrics
from megalith.observe.time_left import TimeLeft
from megalith.storage import LocalStore
from megalith.training import callbacks, loop
from megalith.training.evaluation import Evaluation
from megalith.training.pretrain import pretrain
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings
from tests.training.plugins import TwoTerms

PEAK = 1e9


def trained(tree: dict[str, Any], world_size: int, task: type[PretrainGPT]) -> None:
    config = load_run(tree, world_size=world_size)
    with patch.object(callbacks, "peak_flops", lambda device, dtype: PEAK):
        pretrain(config, str, str, RunParts(task(config)))


def test_mfu_is_model_flops_a_second_over_the_peak_of_all_ranks(tmp_path):
    tree = settings(tmp_path, train={"steps": 1}, parallel={"shard": 2})
    ranks(2, trained, tree, 2, PretrainGPT)
    [record] = read_metrics(Path(tree["run"]))
    H, A, G, D, F, L, V = 32, 8, 4, 4, 48, 2, 61
    weights = L * (H * (A + 2 * G) * D + A * D * H + 3 * H * F) + V * H
    flops = 3 * (2 * weights + 2 * A * D * SEQ * L)  # per token
    assert record["mfu"] == pytest.approx(8 * SEQ * flops / record["step_seconds"] / (2 * PEAK), rel=1e-9)


def test_a_loss_of_several_terms_is_recorded_term_by_term(tmp_path):
    tree = settings(tmp_path, train={"steps": 1})
    tree["data"]["valid"] = tree["data"]["train"]
    ranks(1, trained, tree, 1, TwoTerms)
    step, held_out = read_metrics(Path(tree["run"]))
    assert step["terms"].keys() == held_out["valid"].keys() == {"lm", "square"}
    assert step["loss"] == pytest.approx(step["terms"]["lm"] + 0.25 * step["terms"]["square"])
    assert held_out["valid_loss"] == held_out["valid"]["lm"]  # the run's main loss


class Compiling(PretrainGPT):
    """A task whose forward is built by torch.compile on its first call, which takes 0.3 s."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)

        def slow(graph: Any, _inputs: Any) -> Any:
            time.sleep(0.3)
            return graph.forward

        self.scaled = torch.compile(lambda x: x * 1.0, backend=slow, dynamic=False)

    def forward(self, model: Any, inputs: Any, hidden: Any) -> Any:
        return self.scaled(super().forward(model, inputs, hidden))


def lines_of(tree: dict[str, Any]) -> tuple[list[str], list[float]]:
    """What the run shows, and the seconds per step from which it estimates the time left."""
    config, lines, seconds = load_run(tree), [], []
    with patch.object(TimeLeft, "add_step", lambda _, step: seconds.append(step)):
        pretrain(config, lines.append, lines.append, RunParts(Compiling(config)))
    return lines, seconds


def test_waiting_for_a_compiler_is_announced_and_is_no_part_of_speed_or_of_the_time_left(tmp_path):
    tree = settings(tmp_path, train={"steps": 20, "log_every": 100, "evaluation": {"every": 10, "samples": 2}})
    tree["data"]["valid"] = tree["data"]["train"]
    tree["checkpoint"] = {"every": 15}
    [(lines, estimated_from)] = ranks(1, lines_of, tree)
    assert sum("torch.compile is compiling for this machine, once" in line for line in lines) == 1
    records = read_metrics(Path(tree["run"]))
    steps = [record for record in records if "loss" in record]
    first, *later = steps
    assert first["time"]["compile"] >= 0.3
    assert not [record for record in later if "compile" in record["time"]]
    assert first["time"]["forward-backward"] < first["step_seconds"] - 0.3
    work = first["step_seconds"] - first["time"]["compile"]
    assert first["tokens_per_second"] * work == pytest.approx(8 * SEQ)
    [line] = [line for line in lines if "1/20" in line]  # although log_every is 100
    assert line.endswith("compiling)")
    assert estimated_from == [work, *(record["step_seconds"] for record in later)]
    assert all(record["peak_memory"] > 1e7 for record in steps)
    # an evaluation without gradients is compiled separately
    held_out = [list(record["time"]) for record in records if "valid_loss" in record]
    assert held_out == [["evaluation", "compile"], ["evaluation"]]
    assert [(record["step"], list(record["between"])) for record in steps if "between" in record] == [
        (16, ["checkpoint"])
    ]


def error_of(tree: dict[str, Any], where: str) -> tuple[str, str, bool]:
    """The error that ends a run on this rank when something fails on rank 1, or for metrics on rank 0."""
    config = load_run(tree, world_size=2)

    class Failing(PretrainGPT):
        def train_dataset(self) -> Any:
            return self._fails_at("train_dataset") or super().train_dataset()

        def counts(self, batch: Any) -> Any:
            return self._fails_at("counts") or super().counts(batch)

        def evaluation_dataset(self, prefix: str) -> Any:
            torn_here = where == "evaluation" and callbacks.dist.get_rank() == 1
            return Torn(prefix, SEQ) if torn_here else super().evaluation_dataset(prefix)

        def _fails_at(self, what: str) -> None:
            if where == what and callbacks.dist.get_rank() == 1:
                torn()

    def write(self: MetricsWriter, record: Any) -> None:
        raise StorageError("the disk is full")

    writing = patch.object(MetricsWriter, "write", write if where == "metrics" else MetricsWriter.write)
    try:
        with writing:
            pretrain(config, str, str, RunParts(Failing(config)))
    except (DataError, StorageError) as error:
        return type(error).__name__, str(error), error.on_every_rank
    return "", "", False


class Torn(EvaluationDataset):
    def __getitem__(self, index: int) -> Any:
        return torn()


def torn() -> Any:
    raise DataError("the file is torn")


@pytest.mark.parametrize(
    ("where", "want"),
    [
        ("train_dataset", ("DataError", "the training data cannot be used: rank 1: the file is torn", True)),
        ("counts", ("DataError", "rank 1: the file is torn", True)),
        ("evaluation", ("DataError", "the held-out data cannot be read: rank 1: the file is torn", True)),
        ("metrics", ("StorageError", "rank 0: the disk is full", True)),
    ],
)
def test_an_error_of_one_rank_is_one_error_of_all(where, want, tmp_path):
    tree = settings(tmp_path, train={"steps": 2}, parallel={"shard": 2})
    tree["data"]["valid"] = tree["data"]["train"]
    assert ranks(2, error_of, tree, where) == [want] * 2


def error_when_a_peer_ends(tree: dict[str, Any], reading_fails: bool) -> str:
    """The traceback of the error that ends a run: reading may fail, in a handler, then a collective fails."""

    def fail() -> None:
        raise IndexError("reading")

    def counts(*_: Any) -> dict[str, int]:
        if reading_fails:
            try:
                raise KeyError("root")
            except KeyError:
                fail()
        return {}

    def totals(*_: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    with patch.object(loop, "local_counts", counts), patch.object(loop, "sum_totals", totals):
        try:
            pretrain(load_run(tree), str, str)
        except (IndexError, RuntimeError) as error:
            return "".join(traceback.format_exception(error))
    return ""


def test_an_error_of_this_rank_is_not_lost_if_another_one_has_ended(tmp_path):
    tree = settings(tmp_path, train={"steps": 2})
    [told] = ranks(1, error_when_a_peer_ends, tree, True)
    assert told.splitlines()[-1] == "IndexError: reading"
    assert "\nKeyError: 'root'\n\nDuring handling of the above exception, another exception occurred:" in told
    assert "connection closed by peer" not in told
    [told] = ranks(1, error_when_a_peer_ends, tree, False)
    assert told.splitlines()[-1] == "RuntimeError: connection closed by peer"


def run_with_held_out_losses(tree: dict[str, Any], losses: dict[int, float]) -> None:
    """A run whose evaluations return ``losses`` in turn."""
    found = iter(losses.values())

    def evaluate(*_: Any, **__: Any) -> Evaluation:
        return Evaluation(loss := next(found), {"lm": loss}, {"lm": 1}, 1, "tokens")

    with patch.object(callbacks, "evaluate", evaluate):
        pretrain(load_run(tree, world_size=2), str, str)


def test_the_best_checkpoint_by_held_out_loss_stays_over_a_restart_too(tmp_path):
    tree = settings(tmp_path, train={"steps": 8, "evaluation": {"every": 2}}, parallel={"shard": 2})
    tree["data"]["valid"] = tree["data"]["train"]
    tree["optim"] |= {"schedule": "constant"}
    tree["checkpoint"] = {"every": 2, "keep": 1, "keep_best": True}
    folder = tmp_path / "run" / "checkpoints"
    ranks(2, run_with_held_out_losses, tree, {2: 3.0, 4: 1.0, 6: float("nan"), 8: 2.0})
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000004", "step-00000008"]
    tree["train"]["steps"] = 12
    ranks(2, run_with_held_out_losses, tree, {10: 1.5, 12: 1.25})
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000004", "step-00000012"]
    assert (folder / "best").read_text() == "step-00000004\n"


def test_the_best_so_far_is_one_that_was_evaluated_and_is_still_saved(tmp_path):
    config = load_run(settings(tmp_path, data={"valid": "held_out"}))
    run: Any = SimpleNamespace(folder=tmp_path, checkpoints=LocalStore(tmp_path / "checkpoints"), config=config)
    lines = ['"step": 1, "valid_loss": 0.5', '"step": 2, "valid_loss": 3.0', '"step": 4, "valid_loss": 4.0']
    unmeasured = ['"step": 3, "valid_loss": null', '"step": 6, "valid_loss": null, "nonfinite": {"valid_loss": "nan"}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{{{line}}}\n" for line in [*lines, *unmeasured]))
    assert callbacks._best_so_far(run) is None
    for step in (2, 3, 4, 6):
        save_checkpoint(run.checkpoints, step, {"w": torch.zeros(1)}, {}, keep_last=9)
    assert callbacks._best_so_far(run) == (3.0, 2)


def test_a_side_product_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    tree = settings(tmp_path, train={"steps": 2})
    (tmp_path / "run" / "report.html").mkdir(parents=True)  # a folder where a file is wanted
    (tmp_path / "run" / "tensorboard").write_text("")  # and the reverse
    [ended] = ranks(1, train_here, write_settings(tree, tmp_path))
    assert ended.code == 0, ended
    assert "tensorboard is disabled for the rest of this run, which continues: " in ended.out
    assert "no report: cannot write " in ended.out
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


def train_here(settings_file: Path) -> Any:
    return here("train", settings_file, "tracking=[tensorboard]")


def test_a_dashboard_that_is_not_installed_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(optional, "has", lambda package: package != "wandb")
    ended = here("train", write_settings(settings(tmp_path), tmp_path), "tracking=[wandb]")
    assert ended.code == 2
    assert "tracking (wandb): logging to Weights & Biases needs wandb" in ended.err
    assert "pip install 'megalith[tracking]'" in ended.err
    assert not (tmp_path / "run").exists()
