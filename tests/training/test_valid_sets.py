"""Several named validation sets: each is evaluated as if alone, in any layout; the first decides which step is best."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from megalith.checkpoint.save import save_checkpoint
from megalith.config import load_run
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.observe import trackers
from megalith.observe.metrics import read_metrics
from megalith.observe.units import perplexity
from megalith.storage import LocalStore
from megalith.training import callbacks
from megalith.training.evaluation import Evaluation
from megalith.training.inference import evaluate_checkpoint
from megalith.training.pretrain import pretrain
from megalith.training.setup import RunParts
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import EOD, VOCAB, settings, write_dataset
from tests.training.plugins import TwoTerms
from tests.training.test_token_ids import write_one_id_too_large


def sets_in(folder: Path) -> dict[str, str]:
    return {"web": write_dataset(folder / "web", 12, seed=1), "code": write_dataset(folder / "code", 7, seed=2)}


def lines_of(tree: dict[str, Any], world_size: int = 1) -> list[str]:
    shown: list[str] = []
    pretrain(load_run(tree, world_size=world_size), shown.append, shown.append)
    return shown


def evaluations(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [record for record in read_metrics(Path(tree["run"])) if "loss" not in record]


OVER = [
    (2, {"shard": 2}),
    pytest.param(2, {"context": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"tensor": 2, "pipeline": 2, "sequence": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "parallel"), OVER)
def test_each_has_the_loss_that_it_has_alone_in_every_layout(world_size, parallel, tmp_path):
    sets = sets_in(tmp_path)
    course = {"steps": 3, "evaluation": {"every": 2}}
    alone = {}
    for name, prefix in sets.items():
        tree = settings(tmp_path, data={"valid": prefix}, train=course, run=str(tmp_path / name / "run"))
        ranks(1, lines_of, tree)
        alone[name] = evaluations(tree)
    tree = settings(tmp_path, data={"valid": sets}, train=course, parallel=parallel)
    ranks(world_size, lines_of, tree, world_size)
    found = evaluations(tree)
    assert [record["step"] for record in found] == [2, 3]
    for number, record in enumerate(found):
        assert list(record["valid_sets"]) == ["web", "code"]
        for name, numbers in record["valid_sets"].items():
            want = alone[name][number]
            assert numbers["tokens"] == want["valid_tokens"]
            assert numbers["loss"] == pytest.approx(want["valid_loss"], rel=1e-9)
            assert numbers["perplexity"] == perplexity(numbers["loss"])
        assert record["valid_loss"] == record["valid_sets"]["web"]["loss"]
        assert record["valid_tokens"] == record["valid_sets"]["web"]["tokens"]


def test_one_prefix_is_recorded_and_shown_as_one_loss(tmp_path):
    tree = settings(tmp_path, data={"valid": sets_in(tmp_path)["web"]}, train={"steps": 1})
    [shown] = ranks(1, lines_of, tree)
    [record] = evaluations(tree)
    assert list(record) == ["step", "valid_loss", "valid_tokens", "time"]
    assert f"step 1  held-out loss {record['valid_loss']:.4f} over {record['valid_tokens']:,} tokens" in shown


def test_named_sets_are_shown_one_a_line_and_drawn_by_name(tmp_path):
    tree = settings(tmp_path, data={"valid": sets_in(tmp_path)}, train={"steps": 1})
    [shown] = ranks(1, lines_of, tree)
    [record] = evaluations(tree)
    for name, numbers in record["valid_sets"].items():
        told = f"{numbers['loss']:.4f}, perplexity {numbers['perplexity']:.2f}, over {numbers['tokens']:,} tokens"
        assert f"step 1  held-out loss of {name} {told}" in shown
    drawn = dict(trackers._scalars(dict(trackers._flat(record, "/"))))
    assert drawn["valid_sets/code/perplexity"] == record["valid_sets"]["code"]["perplexity"]


def train_two_terms(tree: dict[str, Any]) -> None:
    config = load_run(tree)
    pretrain(config, str, str, RunParts(TwoTerms(config)))


def test_the_terms_of_a_loss_are_recorded_set_by_set(tmp_path):
    tree = settings(tmp_path, data={"valid": sets_in(tmp_path)}, train={"steps": 1})
    ranks(1, train_two_terms, tree)
    [record] = evaluations(tree)
    assert record["valid"] == record["valid_sets"]["web"]["means"]
    assert record["valid_sets"]["code"]["means"].keys() == {"lm", "square"}


def test_a_set_without_a_loss_is_told_and_the_others_are_measured(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "ends", "uint16") as builder:
        builder.add_document([EOD, EOD, EOD])
        builder.finalize(vocab_size=VOCAB, eod=EOD)
    sets = {"ends": str(tmp_path / "ends"), "code": sets_in(tmp_path)["code"]}
    tree = settings(tmp_path, data={"valid": sets}, train={"steps": 1})
    [shown] = ranks(1, lines_of, tree)
    assert (
        "step 1  held-out loss of ends not measured: none of the tokens read from data.valid.ends has a loss" in shown
    )
    [record] = evaluations(tree)
    assert "valid_loss" not in record
    assert list(record["valid_sets"]) == ["code"]


def run_with_losses(tree: dict[str, Any], losses: list[float]) -> None:
    found = iter(losses)

    def evaluate(*_: Any, **__: Any) -> Evaluation:
        return Evaluation(loss := next(found), {"lm": loss}, {"lm": 1}, 1, "tokens")

    with patch.object(callbacks, "evaluate", evaluate):
        lines_of(tree)


def test_the_first_set_decides_which_checkpoint_is_the_best(tmp_path):
    tree = settings(tmp_path, data={"valid": sets_in(tmp_path)}, train={"steps": 3, "evaluation": {"every": 1}})
    tree["checkpoint"] = {"every": 1, "keep": 1, "keep_best": True}
    ranks(1, run_with_losses, tree, [3.0, 0.1, 1.0, 0.3, 2.0, 0.2])  # web and code for each step
    assert (tmp_path / "run" / "checkpoints" / "best").read_text() == "step-00000002\n"


def test_the_best_so_far_is_that_of_the_set_that_decides_now(tmp_path):
    checkpoints = LocalStore(tmp_path / "checkpoints")
    records = [
        {"step": 1, "valid_loss": 0.1},  # of a single prefix
        {"step": 2, "valid_loss": 4.0, "valid_sets": {"web": {"loss": 4.0}, "code": {"loss": 1.0}}},
        {"step": 3, "valid_loss": 2.0, "valid_sets": {"web": {"loss": 2.0}, "code": {"loss": 3.0}}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (1, 2, 3):
        save_checkpoint(checkpoints, step, {"w": torch.zeros(1)}, {}, keep_last=9)

    def best(valid: Any) -> Any:
        config = load_run(settings(tmp_path, data={"valid": valid}))
        run: Any = type("Run", (), {"folder": tmp_path, "checkpoints": checkpoints, "config": config})
        return callbacks._best_so_far(run)

    assert best({"web": "a", "code": "b"}) == (2.0, 3)
    assert best({"code": "b", "web": "a"}) == (1.0, 2)
    assert best("a") == (0.1, 1)
    assert best({"other": "a"}) is None


def go_on(*arguments: Any) -> Any:
    return here("train", *arguments)


def test_a_set_that_changes_is_told_by_its_name_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets_in(tmp_path)
    tree = settings(tmp_path, data={"valid": {"web": "web", "code": "code"}}, train={"steps": 1})
    settings_file = write_settings(tree, tmp_path)
    assert go_on(settings_file).code == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["valid"]
    assert kept == {"web": str(tmp_path / "web"), "code": str(tmp_path / "code")}
    same = go_on(settings_file, "train.steps=2").out
    assert "changed since step 1: train.steps 1 -> 2\n" in same
    found = go_on(settings_file, "train.steps=3", "data.valid={web: text, code: code}").out
    assert f'changed since step 2: data.valid.web "{tmp_path / "web"}" -> "{tmp_path / "text"}", train.steps' in found


def test_every_set_is_checked_before_the_start(tmp_path):
    tree = settings(tmp_path)
    large = write_one_id_too_large(tmp_path / "large", recorded=True)
    with IndexedDatasetBuilder(tmp_path / "another", "uint16") as builder:
        builder.add_document([1, 2, 3])
        builder.finalize(vocab_size=VOCAB, eod=EOD, tokenizer_sha256="another")
    with IndexedDatasetBuilder(tmp_path / "one", "uint16") as builder:
        builder.add_document([1, 2, 3])
        builder.finalize(vocab_size=VOCAB, eod=EOD, tokenizer_sha256="one")
    valid = {"gone": "nowhere", "large": large, "one": str(tmp_path / "one"), "another": str(tmp_path / "another")}
    found = here("train", write_settings({**tree, "data": {**tree["data"], "valid": valid}}, tmp_path), "--dry-run")
    assert found.code == 2
    assert "data.valid.gone: nowhere.idx cannot be read" in found.err
    assert "data.valid.large: token 3 of document 17 in" in found.err
    another, one = (f"data.valid.{name} ({tmp_path / name})" for name in ("another", "one"))
    assert f"{another} and {one} were made with different tokenizers; prepare one" in found.err
    assert found.err.count("\n") == 4


def test_eval_measures_each_set_or_the_data_that_are_given(tmp_path):
    sets = sets_in(tmp_path)
    tree = settings(tmp_path, data={"valid": sets}, train={"steps": 1})
    ranks(1, lines_of, tree)
    [record] = evaluations(tree)
    found = here("eval", tree["run"])
    assert found.code == 0, found
    for line, (name, numbers) in zip(found.out.splitlines(), record["valid_sets"].items(), strict=True):
        loss = f"loss {numbers['loss']:.4f} nats per token, perplexity {numbers['perplexity']:.2f}"
        assert line == f"{name}, {sets[name]}: {loss}, over {numbers['tokens']} tokens, at step 1"
    seen: list[tuple[int, int]] = []
    evaluate_checkpoint(tree["run"], None, None, progress=lambda *progress: seen.append(progress))
    total = seen[0][1]
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    alone = here("eval", tree["run"], "--data", sets["code"]).out
    assert alone == found.out.splitlines()[1].removeprefix("code, ") + "\n"
    for file in tmp_path.glob("code.*"):
        file.unlink()
    gone = here("eval", tree["run"])
    assert (gone.code, gone.out) == (2, "")
    assert f"data.valid.code of {tree['run']}: {sets['code']}.idx cannot be read" in gone.err
    assert gone.err.endswith("give other data with --data PREFIX\n")
