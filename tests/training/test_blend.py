"""A run on several datasets: the same in every layout, continued where it stopped, told by dataset."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.insight.report import write_report
from megalith.observe.metrics import read_metrics
from megalith.training import dry_run
from megalith.training.dry_run import describe
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import EOD, SEQ, VOCAB, settings, write_dataset
from tests.training.on_ranks import first_steps
from tests.training.reference import differences, reference
from tests.training.starts import MODEL, snapshot

WEIGHTS = {"web": 2, "code": 1}
ORDER = "wcwwcwwcwwcwwcww"  # round(n/3) of the first n are of code


def blend(folder: Path, **data: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    sets = {"web": write_dataset(folder / "web", 12, seed=1), "code": write_dataset(folder / "code", 7, seed=2)}
    return settings(folder, data={"train": sets, "weights": WEIGHTS, **data})


def samples_in(order: str, tree: dict[str, Any]) -> list[Any]:
    """The samples that ``order`` names by the first letter of their datasets."""
    seed = load_run(tree).train.seed
    datasets = {name[0]: GPTDataset(prefix, SEQ, seed, mask_eod=True) for name, prefix in tree["data"]["train"].items()}
    return [datasets[name][order[:index].count(name)] for index, name in enumerate(order)]


OVER = [
    (1, {}),
    (4, {"tensor": 2, "sequence": True, "shard": 2}),
    (2, {"context": 2}),
    pytest.param(4, {"pipeline": 2, "replicate": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "parallel"), OVER)
def test_every_layout_trains_on_the_samples_in_their_order(world_size, parallel, tmp_path):
    tree = blend(tmp_path)
    want = reference(tree, samples=samples_in(ORDER, tree))
    for rank, found in enumerate(ranks(world_size, first_steps, {**tree, "parallel": parallel}, world_size)):
        assert differences(found, want) == [], f"on rank {rank}"


def test_a_phase_may_begin_within_a_step(tmp_path):
    tree = blend(tmp_path, phases=[{"first_sample": 10, "weights": {"web": 1, "code": 1}}])
    want = reference(tree, samples=samples_in(ORDER[:10] + "cwcwcw", tree))
    [found] = ranks(1, first_steps, tree, 1)
    assert differences(found, want) == []


# ---- the program


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of four steps of 8 samples, in ``run``."""
    folder = tmp_path_factory.mktemp("finished")
    tree = blend(folder) | {"model": MODEL, "precision": {"dtype": "float32"}}
    tree["train"] = {**tree["train"], "log_every": 2}
    write_settings(tree, folder)
    found = here("train", folder / "settings.yaml")
    assert found.code == 0, found
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """This test's own copy."""
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    settings_file = copy / "settings.yaml"
    settings_file.write_text(settings_file.read_text().replace(str(finished), str(copy)))
    return copy


def train(folder: Path, *overrides: str) -> Any:
    return here("train", folder / "settings.yaml", *overrides)


def phases(first_sample: int, **weights: float) -> str:
    return f"data.phases={json.dumps([{'first_sample': first_sample, 'weights': weights}])}"


def test_every_shown_step_records_what_was_read_of_each_dataset(finished):
    records = {record["step"]: record for record in read_metrics(finished / "run")}
    assert [step for step, record in records.items() if "datasets" in record] == [1, 2, 4]
    for step, (web, code) in {1: (5, 3), 2: (11, 5), 4: (21, 11)}.items():
        assert (8 * step, web + code) == (8 * step, 8 * step)
        for name, samples in (("web", web), ("code", code)):
            found, num_tokens = records[step]["datasets"][name], IndexedDataset(finished / name).num_tokens
            assert found == {"samples": samples, "epochs": pytest.approx(samples * SEQ / num_tokens)}


def test_the_report_has_a_table_of_the_datasets(finished):
    page = write_report(finished / "run").read_text()
    assert "<h2>Training data" in page
    assert re.search(r"<tr><td>web<td>21 samples<td>65.6%<td>\d", page)
    assert re.search(r"<tr><td>code<td>11 samples<td>34.4%<td>\d", page)


def test_a_run_that_goes_on_reads_what_it_would_have_read(folder, tmp_path):
    later = ["train.steps=6", phases(32, web=0, code=1)]
    assert "resumed from" in train(folder, *later).out
    assert "started at" in train(folder, *later, f"run={tmp_path / 'whole'}").out
    stopped, whole = (read_metrics(run) for run in (folder / "run", tmp_path / "whole"))
    assert [record["loss"] for record in stopped] == [record["loss"] for record in whole]
    assert whole[-1]["datasets"]["code"]["samples"] == 11 + 16


REFUSED = {
    "other weights": (["data.weights={web: 1, code: 1}"], 'blend "0: code 1, web 2" -> "0: code 1, web 1"'),
    "a phase in the past": ([phases(31, web=1, code=0)], 'blend "0: code 1, web 2" -> "0: code 1, web 2; 31: web 1"'),
    "one dataset": (["data.train=PLACE/web", "data.weights=null"], '"0: code 1, web 2" -> "one dataset"'),
    "other names": (
        ["data.train={www: PLACE/web, code: PLACE/code}", "data.weights={www: 2, code: 1}"],
        'blend "0: code 1, web 2" -> "0: code 1, www 2"',
    ),
    "files exchanged": (["data.train={web: PLACE/code, code: PLACE/web}"], "web/text "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_repeat_or_skip_samples_is_refused_with_the_way_out(name, folder):
    overrides, message = REFUSED[name]
    before = snapshot(folder)
    found = train(folder, "train.steps=6", *(override.replace("PLACE", str(folder)) for override in overrides))
    assert found.code == 2
    assert message in found.err
    if name != "one dataset":
        assert "undo these changes (an entry of data.phases with first_sample 32 sets other weights" in found.err
    assert snapshot(folder) == before


def test_a_run_on_one_dataset_goes_on_with_several(tmp_path):
    tree = blend(tmp_path) | {"model": MODEL, "precision": {"dtype": "float32"}}
    tree["data"] = {**tree["data"], "train": str(tmp_path / "web"), "weights": None}
    write_settings(tree, tmp_path)
    assert train(tmp_path).code == 0
    sets = f"data.train={{old: {tmp_path / 'web'}, new: {tmp_path / 'code'}}}"
    weights = ["data.weights={old: 1, new: 0}", phases(32, old=1, new=1)]
    assert train(tmp_path, sets, "train.steps=5").code == 2
    found = train(tmp_path, sets, *weights, "train.steps=5")
    assert found.code == 0, found
    counts = read_metrics(tmp_path / "run")[-1]["datasets"]
    assert {name: each["samples"] for name, each in counts.items()} == {"old": 36, "new": 4}


def write_with(prefix: Path, **origin: Any) -> str:
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        builder.add_document([1, 2, 3, EOD] * 8)
        builder.finalize(**origin)
    return str(prefix)


def test_datasets_of_different_tokenizers_are_refused_by_name(tmp_path):
    tree = settings(tmp_path)
    sets = {
        name: write_with(tmp_path / name, vocab_size=VOCAB, tokenizer="t.json", tokenizer_sha256=name * 64)
        for name in "ab"
    }
    write_settings({**tree, "data": {**tree["data"], "train": sets}}, tmp_path)
    found = train(tmp_path)
    assert found.code == 2
    assert f"data.train.a ({sets['a']}) and data.train.b ({sets['b']}) were made with different tokenizers" in found.err


def test_a_dataset_that_cannot_be_read_is_named(tmp_path):
    tree = blend(tmp_path)
    (tmp_path / "code.bin").unlink()
    write_settings(tree, tmp_path)
    found = train(tmp_path)
    assert found.code == 2
    assert found.err.startswith("error: data.train.code: ")
    assert found.err.count("code.bin") == 1


def test_the_vocabulary_is_that_of_any_dataset_that_records_it(tmp_path):
    tree = settings(tmp_path)
    sets = {"a": write_with(tmp_path / "a"), "b": write_with(tmp_path / "b", vocab_size=VOCAB, eod=EOD)}
    del tree["model"]["vocab_size"]
    write_settings({**tree, "data": {**tree["data"], "train": sets}}, tmp_path)
    found = train(tmp_path, "train.steps=1")
    assert found.code == 0, found
    assert f"vocab_size: {VOCAB}" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_dry_run_tells_how_much_of_each_dataset_will_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "_memory", lambda *_: "not counted")
    tree = blend(tmp_path)
    del tree["train"]["global_batch_size"]
    tree["train"] |= {"steps": 5, "batch_size_schedule": "0:4 6:8"}  # 4 + 4 + 8 + 8 + 8
    text = describe(load_run(tree, world_size=1), 1)
    assert f"tokens per step       {8 * SEQ}, {32 * SEQ} in total\n" in text
    assert re.search(
        r"training data         32 samples in total:\n  web {17}21 samples, [\d.]+ epochs\n  code {16}11 samples, ",
        text,
    )
