"""A run's state in checkpoints: it has a version, older ones are upgraded, later ones refused."""

from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.errors import CheckpointError
from megalith.training.setup import build_run
from megalith.training.state import STATE_VERSION, checked_state, upgraded
from tests.rank_pool import ranks
from tests.tiny_run import settings

TRAIN = {"step": 5, "consumed_samples": 40, "skipped_steps": 2}


def test_a_state_goes_through_every_upgrade_between_its_version_and_this_one():
    upgrades = {
        1: lambda state: {**state, "log": [*state.get("log", []), "1 to 2"]},
        2: lambda state: {**state, "log": [*state["log"], "2 to 3"], "added": 0},
    }
    assert upgraded({}, upgrades=upgrades, wanted=3) == {"log": ["1 to 2", "2 to 3"], "added": 0, "version": 3}
    assert upgraded({"version": 2, "log": []}, upgrades=upgrades, wanted=3)["log"] == ["2 to 3"]
    assert upgraded({"version": 3, "kept": 1}, upgrades=upgrades, wanted=3) == {"version": 3, "kept": 1}


def test_the_first_version_had_a_counter_that_is_gone():
    old = {"train": {**TRAIN, "consumed_tokens": 600}}
    assert upgraded(old)["train"] == TRAIN
    assert "consumed_tokens" in old["train"], "what is given stays as it is"


def test_a_later_version_is_refused():
    with pytest.raises(
        CheckpointError, match=r"of version 99, but this version of Megalith only reads up to \d+; use the version"
    ):
        upgraded({"version": 99})


def loaded(tree: dict[str, Any]) -> tuple[dict[str, Any], set[float], str]:
    """The state of a loaded run, the updates that its moments have seen, and a refusal."""
    run = build_run(load_run(tree), torch.device("cpu"))
    state = run.state_dict()
    tokens = TRAIN["consumed_samples"] * state["data"]["tokens_per_sample"]
    run.load_state(checked_state({**state, "train": TRAIN, "data": {**state["data"], "tokens": tokens}}))
    updates = {float(entry["step"]) for entry in run.optimizer.torch_optimizer.state.values()}
    with pytest.raises(CheckpointError) as refusal:
        checked_state({**state, "version": 99})
    return run.state_dict(), updates, str(refusal.value)


def test_a_run_writes_its_version_and_its_moments_count_the_steps_that_moved_weights(tmp_path):
    [(state, updates, refusal)] = ranks(1, loaded, settings(tmp_path))
    assert (state["version"], state["train"]) == (STATE_VERSION, TRAIN)
    assert updates == {3.0}  # two of five were skipped
    assert "version 99" in refusal
