"""A run with reordered documents: the same in every layout and after a resume; and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config import load_run
from megalith.data.prepare import prepare
from megalith.errors import ConfigError, DataError
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.training.dry_run import describe
from megalith.training.tasks.choose import task_of
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.tiny_run import LLAMA, settings
from tests.training.outcomes import losses, run_here

NUM_ENTRIES = 280


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Writes a dataset with its tokenizer; returns its prefix."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"Once there were {number} ships, and each had a name.\n" * (number % 4))
    prepare([folder], folder / "text", vocab_size=NUM_ENTRIES, special_tokens=["fim"])
    return folder / "text"


def fim_settings(text: Path, folder: Path, **groups: Any) -> dict[str, Any]:
    groups["data"] = {"train": str(text), "fill_in_the_middle": {"rate": 0.7}, **groups.get("data", {})}
    groups["model"] = {**LLAMA, "vocab_size": 283, **groups.get("model", {})}
    return settings(folder, **groups)


def test_losses_are_the_same_in_every_layout_and_after_a_stop(text, tmp_path):
    train = {"steps": 6}
    whole = fim_settings(text, tmp_path, train=train)
    ranks(1, run_here, whole, 1)
    expected = losses(whole["run"])
    split = {**whole, "run": str(tmp_path / "split"), "parallel": {"shard": 2}}
    ranks(2, run_here, {**split, "train": {**split["train"], "steps": 3}}, 2)
    ranks(2, run_here, {**split, "parallel": {"tensor": 2, "sequence": True}}, 2)
    np.testing.assert_allclose(losses(split["run"]), expected, rtol=LAYOUT_FLOAT64)
    plain = fim_settings(text, tmp_path, train=train, data={"fill_in_the_middle": None})
    plain["run"] = str(tmp_path / "plain")
    ranks(1, run_here, plain, 1)
    assert np.abs(np.subtract(losses(plain["run"]), expected)).min() > 1e-4


def test_a_dry_run_shows_where_the_parts_are(text, tmp_path):
    shown = describe(load_run(fim_settings(text, tmp_path, data={"fill_in_the_middle": {"rate": 1.0}})), 1)
    assert "<fim_suffix>" in shown
    assert "<fim_middle>" in shown


@pytest.mark.parametrize("setting", ["rate", "spm_rate"])
def test_a_share_that_is_none_is_refused(setting, text, tmp_path):
    with pytest.raises(ConfigError, match=rf"data.fill_in_the_middle.{setting} .*1\.5"):
        load_run(fim_settings(text, tmp_path, data={"fill_in_the_middle": {"rate": 0.5, setting: 1.5}}))


def test_a_rate_of_nothing_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"data.fill_in_the_middle.rate"):
        load_run(fim_settings(text, tmp_path, data={"fill_in_the_middle": {"rate": 0.0}}))


def test_data_and_models_that_cannot_be_reordered_are_refused_before_the_first_step(text, tmp_path):
    without = settings(tmp_path, data={"fill_in_the_middle": {"rate": 0.5}})
    with pytest.raises(DataError, match="does not record which tokenizer made it"):
        task_of(load_run(without)).train_dataset()
    # the three ids follow EOD's; apart from them, a tokenizer may have more tokens than the model has rows
    names = {"rate": 0.5, "prefix_token": "<fim_prefix>", "middle_token": "<fim_middle>", "suffix_token": "ships"}
    with pytest.raises(DataError, match=r"with the tokens ships;"):
        task_of(load_run(fim_settings(text, tmp_path, data={"fill_in_the_middle": names}))).train_dataset()
    small = load_run(fim_settings(text, tmp_path, model={"vocab_size": 3}))
    with pytest.raises(ConfigError, match=r"model.vocab_size \(3\) must be at least 4, because .*; use 280"):
        task_of(small).train_dataset()
    bert = masked_settings(tmp_path / "bert", data={"fill_in_the_middle": {"rate": 0.5}})
    with pytest.raises(ConfigError, match=r"data.fill_in_the_middle is for a GPT, .*model.bert sees both sides"):
        task_of(load_run(bert))
