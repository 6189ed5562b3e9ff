"""Whatever state.json contains, it is loaded or refused in one line: the file, the field, wanted and given values."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import save_checkpoint
from megalith.config import load_run
from megalith.errors import CheckpointError
from megalith.storage import LocalStore
from megalith.training.setup import build_run
from megalith.training.state import checked_state, read_saved_state
from tests.checkpoint.manifests import replace_listed
from tests.rank_pool import ranks
from tests.tiny_run import settings

STATE: dict[str, Any] = {
    "version": 3,
    "train": {"step": 2, "consumed_samples": 16, "skipped_steps": 1},
    "scheduler": {
        "num_steps": 1,
        "unit": "steps",
        "init_lr": 0.0,
        "max_lr": 0.001,
        "min_lr": 0.0,
        "lr_warmup_steps": 0,
        "lr_decay_steps": None,
        "lr_decay_style": "constant",
        "wsd_decay_steps": None,
        "lr_wsd_decay_style": None,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    },
    "loss_scale": {"scale": 65536.0, "clean_steps": 2, "borne": 0},
    "rng": {"seed": 1234, "step": 2},
    "data": {"tokens": 256, "tokens_per_sample": 16, "identity": {"text": "ab", "tokenizer": None}},
    "settings": {"train": {"steps": 4}},
    "layout": "tp1 dp1",
}
MISSING = object()
COUNT = "an integer from 0 to 100000000000000"
NUMBER = "a finite number of at least 0"
# the field, its bad value, what the message must contain
FIELDS: list[tuple[str, Any, str]] = [
    *(("train.step", value, f"{COUNT}; got {given}") for value, given in (
        ("2", '"2"'),
        (2.5, "2.5"),
        (2.0, "2.0"),
        (10**15, "1000000000000000"),
        (10**4000, "1000000000"),
        (-1, "-1"),
        (True, "true"),
        (None, "null"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        ([2], r"\[2\]"),
        ({"step": 2}, r'{"step": 2}'),
    )),
    ("train.step", MISSING, f"{COUNT}; it is missing"),
    ("train.step", 17, "train.consumed_samples must be an integer from 17 to .*; got 16"),
    ("train.consumed_samples", "16", '; got "16"'),
    ("train.consumed_samples", 1, "an integer from 2 to .*; got 1"),
    ("train.consumed_samples", 10**15, "got 1000000000000000"),
    ("train.consumed_samples", 17, r"data.tokens must be 272 \(17 samples of 16 tokens\); got 256"),
    ("train.skipped_steps", 3, "an integer from 0 to 2; got 3"),
    ("train.skipped_steps", False, "got false"),
    ("train.more", 3, 'train must have only the fields step, consumed_samples, skipped_steps; got "more"'),
    ("train", [2, 16, 0], r"an object; got \[2, 16, 0\]"),
    ("train", None, "an object; got null"),
    ("train", MISSING, "an object; it is missing"),
    ("version", "2", 'version must be an integer from 1 to .*; got "2"'),
    ("version", 2.5, "got 2.5"),
    ("version", True, "got true"),
    ("version", None, "got null"),
    ("version", 0, "an integer from 1 .*; got 0"),
    ("version", 99, "of version 99, but this version of Megalith only reads up to 3"),
    ("scheduler", MISSING, "an object; it is missing"),
    ("scheduler", 3, "an object; got 3"),
    ("scheduler.num_steps", "1", 'an integer from 0 to 2; got "1"'),
    ("scheduler.num_steps", MISSING, "an integer from 0 to 2; it is missing"),
    ("scheduler.num_steps", 1.5, "an integer from 0 to 2; got 1.5"),
    ("scheduler.num_steps", 3, "an integer from 0 to 2; got 3"),
    ("scheduler.max_lr", "0.001", f'{NUMBER}; got "0.001"'),
    ("scheduler.max_lr", float("nan"), f"{NUMBER}; got NaN"),
    ("scheduler.max_lr", 10**400, f"{NUMBER}; got 1000"),
    ("scheduler.min_lr", None, f"{NUMBER}; got null"),
    ("scheduler.lr_decay_steps", [1], rf"{NUMBER}; got \[1\]"),
    ("scheduler.lr_decay_style", 1, "a string; got 1"),
    ("scheduler.lr_wsd_decay_style", {}, "a string; got {}"),
    ("scheduler.unit", None, "a string; got null"),
    ("loss_scale", "65536", 'an object; got "65536"'),
    ("loss_scale", MISSING, "an object; it is missing"),
    ("loss_scale.scale", "65536", f'{NUMBER}; got "65536"'),
    ("loss_scale.scale", float("inf"), f"{NUMBER}; got Infinity"),
    ("loss_scale.scale", 0.0, "above 0; got 0.0"),
    ("loss_scale.borne", -1, f"{COUNT}; got -1"),
    ("loss_scale.clean_steps", MISSING, "an integer from 0 to 2; it is missing"),
    ("loss_scale.clean_steps", 3, "an integer from 0 to 2; got 3"),
    ("loss_scale.more", 1, 'loss_scale must have only the fields scale, clean_steps, borne; got "more"'),
    ("rng", [], r"an object; got \[\]"),
    ("rng.seed", 2**63, "an integer from 0 to 9223372036854775807; got 9223372036854775808"),
    ("rng.seed", "1234", 'got "1234"'),
    ("rng.seed", MISSING, "it is missing"),
    ("data", 3, "an object; got 3"),
    ("data.tokens", 255, r"data.tokens must be 256 \(16 samples of 16 tokens\); got 255"),
    ("data.tokens_per_sample", 0, "an integer from 1 .*; got 0"),
    ("data.identity", "ab", 'an object; got "ab"'),
    ("data.identity.text", {"a": 1}, r'data\.identity\.text must be a plain value; got {"a": 1}'),
    ("settings", [], r"an object; got \[\]"),
    ("layout", 3, "a string; got 3"),
]  # fmt: skip
# the whole file, what the message must contain
FILES: dict[str, tuple[bytes, str]] = {
    "a list": (b"[1, 2]", r"must be a JSON object; got \[1, 2\]"),
    "a number": (b"3", "must be a JSON object; got 3"),
    "null": (b"null", "must be a JSON object; got null"),
    "a string": (b'"' + b"a" * 500 + b'"', r'must be a JSON object; got "a{99}\.\.\.'),
    "nothing": (b"", "is not valid JSON in UTF-8: Expecting value"),
    "no JSON": (b'{"train": ', "is not valid JSON in UTF-8: Expecting value"),
    "not UTF-8": (b'{"a": "\xff\xfe"}', "is not valid JSON in UTF-8: .*can't decode byte 0xff"),
    "UTF-16": (json.dumps(STATE).encode("utf-16"), "is not valid JSON in UTF-8"),
    "nested 100,000 deep": (b"[" * 100_000, "is not valid JSON in UTF-8: .*recursion"),
    "a number of 5,000 digits": (b'{"version": ' + b"9" * 5000 + b"}", "is not valid JSON in UTF-8: .*digits"),
    "17 MB": (b" " * (17 << 20), "may have at most 16777216 bytes; it has 17825792"),
    "an empty object": (b"{}", "train must be an object; it is missing"),
}


def put(field: str, value: Any) -> dict[str, Any]:
    """STATE with ``value`` at the dotted ``field``."""
    state = copy.deepcopy(STATE)
    *groups, name = field.split(".")
    group = state
    for each in groups:
        group = group[each]
    group[name] = value
    if value is MISSING:
        del group[name]
    return state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("run"), 2, {"w": torch.zeros(1)}, STATE, keep_last=1)


def test_the_state_of_these_tests_is_one(checkpoint):
    replace_listed(checkpoint, "state.json", json.dumps(STATE).encode())
    saved = read_saved_state(LocalStore(checkpoint))
    assert (saved.train.step, saved.seed, saved.data) == (
        2,
        1234,
        {"tokens_per_sample": 16, "text": "ab", "tokenizer": None},
    )


def refusal(checkpoint: Path, content: bytes) -> str:
    replace_listed(checkpoint, "state.json", content)
    with pytest.raises(CheckpointError) as caught:
        read_saved_state(LocalStore(checkpoint))
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [pytest.param(*row, id=f"{row[0]}-{number}") for number, row in enumerate(FIELDS)],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(checkpoint, field, value, says):
    message = refusal(checkpoint, json.dumps(put(field, value)).encode())
    assert message.startswith(f"{checkpoint}/state.json: ")
    assert re.search(says, message), message
    assert f"{field} must be" in message or " must " in says or "of version" in says, "the field is named"
    assert len(message) < 500
    assert "\n" not in message


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_wrong_kind_is_refused(checkpoint, name):
    content, says = FILES[name]
    message = refusal(checkpoint, content)
    assert message.startswith(f"{checkpoint}/state.json")
    assert re.search(says, message), message
    assert len(message) < 500


def written(tree: dict[str, Any]) -> dict[str, Any]:
    return build_run(load_run(tree), torch.device("cpu")).state_dict()


def test_the_table_has_the_fields_that_a_run_writes(tmp_path):
    """In float16, so that there is a loss scale."""
    [state] = ranks(1, written, settings(tmp_path, precision={"dtype": "float16"}))
    checked_state(json.loads(json.dumps(state)))
    for group in ("train", "scheduler", "loss_scale", "rng", "data"):
        assert state[group].keys() == STATE[group].keys()
    assert state.keys() == STATE.keys()
