"""A run over token ids without a row in the model: reported before step 1 or, beyond the scan, by all ranks at once."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models

from megalith.data import token_ids
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.observe.metrics import read_metrics
from tests.program import Ended, here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import EOD, VOCAB, settings, write_dataset


def write_one_id_too_large(prefix: Path, *, recorded: bool) -> str:
    """Writes thirty documents of ten tokens; token 3 of document 17 is the first id outside the vocabulary."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(30):
            tokens = np.arange(1, 11) + number
            tokens[3] = VOCAB if number == 17 else tokens[3]
            builder.add_document(tokens)
        builder.finalize(vocab_size=VOCAB, eod=EOD)
    if not recorded:
        prefix.with_suffix(".json").unlink()
    return str(prefix)


@pytest.mark.parametrize(
    ("setting", "recorded"), [("data.train", True), ("data.train", False), ("data.valid", True), ("data.valid", False)]
)
def test_a_run_is_refused_before_its_first_step(setting, recorded, tmp_path):
    settings_file = write_settings(settings(tmp_path), tmp_path)
    prefix = write_one_id_too_large(tmp_path / "large", recorded=recorded)
    found = here("train", settings_file, f"{setting}={prefix}")
    assert found.code == 2, found
    assert found.err.startswith(f"error: {setting}: token 3 of document 17 in {prefix} has id 61; ")
    assert "below 61, the model's vocabulary size" in found.err
    assert not (tmp_path / "run").exists()


def test_what_was_scanned_is_one_line_of_the_log(tmp_path, caplog):
    tree = settings(tmp_path)
    (tmp_path / "text.json").unlink()
    with caplog.at_level(logging.INFO):
        assert here("train", write_settings(tree, tmp_path), "train.steps=1").code == 0
    [line] = [record.message for record in caplog.records if "token ids" in record.message]
    assert line.startswith(f"data.train: {tmp_path / 'text'} does not record its token ids: scanned all ")


def tokenizer_of_one_more(folder: Path, *, special: bool) -> Path:
    """A tokenizer with one more token than the model has rows, like Gemma 3's own tokenizer."""
    made = tokenizers.Tokenizer(
        models.WordLevel({"</s>": EOD} | {f"t{id}": id for id in range(1, VOCAB)}, unk_token="t1")
    )
    made.add_special_tokens(["</s>"])
    made.add_tokens([AddedToken("<image>", special=special)])
    (folder / "made.json").write_text(made.to_str())
    return folder / "made.json"


@pytest.mark.parametrize("named", ["in the settings", "beside the data"])
def test_a_special_token_beyond_the_last_row_is_no_reason_to_refuse_a_tokenizer(named, tmp_path):
    path = tokenizer_of_one_more(tmp_path, special=True)
    data = {"train": write_dataset(tmp_path / "x", tokenizer=path)}
    data |= {"tokenizer": str(path)} if named == "in the settings" else {}
    assert here("train", write_settings(settings(tmp_path, data=data), tmp_path), "train.steps=1").code == 0


@pytest.mark.parametrize("named", ["in the settings", "beside the data"])
def test_a_token_of_text_beyond_the_last_row_is_one(named, tmp_path):
    path = tokenizer_of_one_more(tmp_path, special=False)
    data = {"train": write_dataset(tmp_path / "x", tokenizer=path)}
    data |= {"tokenizer": str(path)} if named == "in the settings" else {}
    found = here("train", write_settings(settings(tmp_path, data=data), tmp_path))
    assert found.code == 2
    assert "model.vocab_size (61) is smaller than the tokenizer needs (62); use 62 or more" in found.err


def train_past_the_scan(*arguments: object) -> Ended:
    """Scans only the first and the last token, as for a file far larger than the scan's limit."""
    # a failing rank waits five seconds for rank 0, which torchrun would kill with it
    with patch.multiple(token_ids, _CHUNK=1, _NUM_CHUNKS=2), patch("megalith.cli.main.time.sleep"):
        return here("train", *arguments)


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_ids_that_the_scan_did_not_see_end_every_rank_with_one_message(parallel, tmp_path):
    data = {"train": write_one_id_too_large(tmp_path / "large", recorded=False)}
    # an epoch has 18 samples: one of the steps reads the id
    tree = settings(tmp_path, data=data, parallel=parallel, train={"steps": 10, "global_batch_size": 4})
    found: list[Any] = ranks(2, train_past_the_scan, write_settings(tree, tmp_path))
    assert [one.code for one in found] == [2, 2], found
    message = "".join(one.err for one in found)
    assert message.count("error: ") == 1
    assert message.count("token 3 of document 17 in") == 1
    assert "sample " in message
    assert len(read_metrics(tmp_path / "run")) < 10
