"""The printed table: a row for each run, what could not be shown, and a verdict that says where to look."""

from megalith.insight.verify.proof import Case, Result
from megalith.insight.verify.record import Key
from megalith.insight.verify.table import as_text
from megalith.insight.verify.verification import Verification

LAYOUT = {"tensor": 8, "shard": 4}
GRADIENT = Key(2, "gradient", "lm_head.weight")
MODULE = Key(1, "module", "the output of model.layers.0.mlp")
SAME = Result(Case({"tensor": 2}, "float64", "blocked"), 3.0, GRADIENT, 1.4e-15, taken=frozenset({"aten", "blocked"}))
OTHER = Result(Case({"tensor": 2, "shard": 2}, "float64", "reference"), 3.0, GRADIENT, 0.5, (MODULE, 0.25))
FAILED = Result(Case({}, "float32", "own"), 3.0, failure="rank 1 was killed by SIGKILL (9) (out of memory?)")


def text(*results: Result, fault: Result | None = None, uncovered: tuple[str, ...] = ()) -> list[str]:
    return as_text(Verification(LAYOUT, "2 layers", results, fault, uncovered)).splitlines()


def test_a_proof_names_its_layouts_and_says_what_is_the_same():
    recipe, small, _, head, row, _, verdict = text(SAME)
    assert recipe == "recipe       tensor 8 x shard 4"
    assert small == "small model  2 layers"
    assert head.split()[:4] == ["ranks", "layout", "dtype", "paths"]
    assert row == (
        "2      tensor 2  float64  aten, blocked  3.0 s  the gradient of lm_head.weight in step 2  1.4e-15  1e-09  same"
    )
    assert verdict == "all 1 runs match: loss, every gradient, gradient norm, and weights after two steps"


def test_a_fault_is_named_with_its_layout_and_how_far_it_is_off():
    lines = text(SAME, OTHER, fault=OTHER)
    assert lines[5].endswith("DIFFERS")
    assert lines[-2] == "1 of 2 runs is wrong; smallest failing layout: tensor 2 x shard 2"
    assert lines[-1] == (
        "first difference, in float64: the output of model.layers.0.mlp in step 1, by 2.5e-01; 1e-09 is allowed"
    )


def test_a_run_that_failed_is_told_with_its_error():
    lines = text(FAILED, fault=FAILED)
    assert lines[4].endswith("FAILED")
    assert lines[-1] == "in float32: rank 1 was killed by SIGKILL (9) (out of memory?)"


def test_what_could_not_be_shown_is_listed():
    lines = text(SAME, uncovered=("path triton: it is not installed",))
    assert lines[lines.index("not covered:") + 1] == "  path triton: it is not installed"


def test_weights_are_named_by_the_step_they_are_of():
    for step, said in [(0, "w at the start"), (2, "w after step 2")]:
        fault = Result(OTHER.case, 1.0, GRADIENT, 1.0, (Key(step, "weight", "w"), 1.0))
        assert f"first difference, in {OTHER.case.dtype}: {said}, by" in text(fault, fault=fault)[-1]
