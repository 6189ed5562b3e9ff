"""Experimental features: off until named, and an error that names the switch."""

import pytest

from megalith.config import experimental, load_run
from megalith.config.settings_tree import FIELDS
from megalith.errors import ExperimentalError


def test_a_feature_passes_when_it_is_named():
    config = load_run("llama-4m", ["train.compile=true", "experimental=[compile]"])
    experimental.require("compile", config)


def test_a_feature_that_is_not_named_is_refused_with_the_switch():
    with pytest.raises(ExperimentalError, match=r"train.compile=true is experimental .*; use experimental=\[compile\]"):
        experimental.require("compile", load_run("llama-4m"))


def test_every_feature_says_what_it_is_and_which_setting_uses_it():
    assert experimental.FEATURES.keys() == experimental.USED_BY.keys()
    assert all(experimental.FEATURES.values())
    assert {use.setting for use in experimental.USED_BY.values()} <= set(FIELDS)


def test_a_name_that_is_no_feature_is_a_slip_of_ours():
    with pytest.raises(AssertionError, match="'fp5' is not in FEATURES"):
        experimental.require("fp5", load_run("llama-4m"))
