"""A run on several datasets: the same in every layout, continued where it stopped, told by dataset."""

import json
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megalith.config import load_run
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.insight.report import write_report
from megalith.observe.metrics import read_metrics
from megalith.storage import LocalStore
from megalith.training import data_checks, dry_run
from megalith.training.dry_run import describe
from megalith.training.inference import _tokenizer_sha256
from megalith.training.planned_data import planned_data
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
    assert snapshot(folder) == before
    settings = re.search(r"change the blend from here on with (data.weights=\{.*?\}) (data.phases=\[.*?\])", found.err)
    assert (settings is None) == (name in ("one dataset", "other names", "files exchanged"))
    if settings is not None:
        assert train(folder, "train.steps=6", *settings.groups()).code == 0


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


def test_a_run_on_one_dataset_is_told_how_to_go_on_with_several(tmp_path):
    tree = blend(tmp_path) | {"model": MODEL, "precision": {"dtype": "float32"}}
    tree["data"] = {**tree["data"], "train": str(tmp_path / "web"), "weights": None}
    write_settings(tree, tmp_path)
    assert train(tmp_path).code == 0
    sets = f"data.train={{old: {tmp_path / 'web'}, new: {tmp_path / 'code'}}}"
    refused = train(tmp_path, sets, "data.weights={old: 1, new: 3}", "train.steps=5").err
    told = "data.weights={old: 1, new: 0} data.phases=[{first_sample: 32, weights: {old: 1, new: 3}}]"
    assert f"undo these changes, or change the blend from here on with {told}, or start from" in refused
    assert train(tmp_path, sets, *told.split(" data."), "train.steps=5").code == 2  # not one override each
    assert train(tmp_path, sets, *told.replace(" data.", "|data.").split("|"), "train.steps=5").code == 0


def test_the_start_says_what_will_be_read_and_what_is_of_little_use(tmp_path):
    tree = blend(tmp_path, weights={"web": 1, "code": 1e-6}, phases=[{"first_sample": 99, "weights": WEIGHTS}])
    write_settings(tree | {"model": MODEL}, tmp_path)
    lines = train(tmp_path).out.splitlines()
    at = lines.index("training data         32 samples in total:")
    epochs = 32 * SEQ / IndexedDataset(tmp_path / "web").num_tokens
    assert sorted(lines[at + 1 : at + 4]) == [
        "  code                0 samples, 0 epochs: none is drawn before the last step",
        "  the phase from sample 99 on begins after the last step",
        f"  web                 32 samples, {epochs:.3g} epochs",
    ]


def test_more_epochs_than_help_and_many_datasets_are_told_in_few_lines():
    class Short:
        samples_per_epoch = Fraction(2)

    dataset = BlendedDataset({f"d{number}": Short() for number in range(30)})
    heading, first, *rest = planned_data(dataset, 300)
    assert heading == "training data         300 samples in total:"
    assert first == (
        "  d0                  10 samples, 5 epochs, more than the 4 that are nearly as good as new text "
        "(arXiv:2305.16264)"
    )
    assert rest[-1] == "  and 10 more"
    assert len(rest) == 20


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


def test_one_dataset_by_two_paths_is_refused(tmp_path):
    tree = blend(tmp_path)
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"web{suffix}")
    tree["data"] |= {"train": {"web": str(tmp_path / "web"), "again": str(tmp_path / "link")}, "weights": None}
    write_settings(tree, tmp_path)
    found = train(tmp_path)
    assert found.code == 2
    assert re.search("data.train.(web|again) and data.train.(web|again) lead to the same file", found.err)


def test_documents_that_end_with_different_tokens_are_refused(tmp_path):
    tree = settings(tmp_path)
    sets = {name: write_with(tmp_path / name, vocab_size=VOCAB, eod=eod) for name, eod in (("a", 0), ("b", 3))}
    write_settings({**tree, "data": {**tree["data"], "train": sets}}, tmp_path)
    found = train(tmp_path)
    assert found.code == 2
    ends = "end with different tokens, 0 and 3; prepare one of them again with the other's --eod"
    assert f"documents of data.train.a ({sets['a']}) and data.train.b ({sets['b']}) {ends}" in found.err


def test_a_dataset_that_cannot_be_read_is_named(tmp_path):
    tree = blend(tmp_path)
    (tmp_path / "code.bin").unlink()
    write_settings(tree, tmp_path)
    found = train(tmp_path)
    assert found.code == 2
    assert found.err.startswith("error: data.train.code: ")
    assert found.err.count("code.bin") == 1


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The paths of two tokenizer.json, and a run that keeps the first."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, text in (("one", "the cat sat " * 9), ("other", "def return " * 9)):
        train_byte_level_bpe([text], vocab_size=270).save(folder / name)
    write_dataset(folder / "with-one", tokenizer=folder / "one")
    tree = settings(folder, model={**MODEL, "vocab_size": 270}, train={"steps": 1})
    write_settings({**tree, "data": {**tree["data"], "train": str(folder / "with-one")}}, folder)
    assert train(folder).code == 0
    return folder


def sets_with(tokenizers: Path, folder: Path, second: str) -> dict[str, Any]:
    """A run on a dataset that records no tokenizer, and on one made with the tokenizer ``second``."""
    shutil.copy(tokenizers / second, folder / second)
    sets = {"plain": write_dataset(folder / "plain"), "told": write_dataset(folder / "told", 9, 1, folder / second)}
    tree = settings(folder, model={**MODEL, "vocab_size": 270}, data={"train": sets}, train={"steps": 1})
    write_settings(tree, folder)
    return tree


def test_the_tokenizer_of_a_run_is_that_of_the_first_dataset_that_names_one(tokenizers, tmp_path):
    tree = sets_with(tokenizers, tmp_path, "one")
    found = train(tmp_path)
    assert found.code == 0, found
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (tokenizers / "one").read_bytes()
    digest = Tokenizer.load(tokenizers / "one").sha256
    assert _tokenizer_sha256(LocalStore(tmp_path / "elsewhere"), load_run(tree)) == digest


def test_a_run_whose_tokenizer_is_gone_says_that_it_keeps_none(tokenizers, tmp_path, caplog):
    sets_with(tokenizers, tmp_path, "one")
    (tmp_path / "one").unlink()
    assert train(tmp_path).code == 0
    [line] = [message for message in caplog.messages if "the run keeps neither" in message]
    assert line.startswith(f"{tmp_path / 'one'} ")
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_every_dataset_is_compared_with_the_tokenizer_that_is_given(tokenizers, tmp_path):
    sets_with(tokenizers, tmp_path, "other")
    found = train(tmp_path, f"data.tokenizer={tokenizers / 'one'}")
    assert found.code == 2
    assert f"is not the tokenizer that made {tmp_path / 'told'}; " in found.err


def test_every_dataset_is_compared_with_the_tokenizer_of_the_model_that_a_run_starts_from(tokenizers, tmp_path, caplog):
    sets_with(tokenizers, tmp_path, "other")
    found = train(tmp_path, f"load={tokenizers / 'run' / 'checkpoints' / 'step-00000001'}")
    assert found.code == 2
    assert f"{tmp_path / 'told'} was made with a different tokenizer than the model of {tokenizers}" in found.err
    assert f"{tmp_path / 'plain'} does not record which tokenizer made it" in caplog.text


def test_datasets_of_which_only_some_begin_their_documents_with_bos_are_told(tokenizers, tmp_path, caplog):
    tree = sets_with(tokenizers, tmp_path, "one")
    tokenizer = Tokenizer.load(tokenizers / "one").framed(begin=(7,))
    with IndexedDatasetBuilder(tmp_path / "begun", "uint16") as builder:
        builder.add_document([7, 1, 2, EOD] * 9)
        builder.finalize(vocab_size=270, eod=EOD, tokenizer="one", tokenizer_sha256=tokenizer.sha256)
    sets = {"begun": str(tmp_path / "begun"), "told": str(tmp_path / "told")}
    config = load_run({**tree, "data": {**tree["data"], "train": sets}})
    with patch.object(data_checks, "tokenizer_of_data", lambda *_: tokenizer):
        assert list(data_checks.check_beginnings(config)) == []
    assert f"documents of {sets['begun']} begin with the tokens [7], those of {sets['told']} do not" in caplog.text


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
