"""Which small runs a recipe needs, and what is reported about what they cannot show."""

import os

import pytest

from megalith import optional
from megalith.config import dump_yaml, load_run
from megalith.insight.verify import verification
from megalith.insight.verify.cover import cover, is_layout
from megalith.insight.verify.proof import Case, Proof, Result
from megalith.insight.verify.record import Key
from megalith.insight.verify.verification import cases, verify

GRADIENT = Key(1, "gradient", "w")
OVERRIDES = ["parallel.tensor=2", "parallel.replicate=2", "precision.dtype=float32"]


class Recorded:
    """A proof that runs nothing: each case reports the paths that it requests, up to one that fails."""

    def __init__(self, fails: Case | None = None) -> None:
        self.fails = fails
        self.ran: list[Case] = []
        self.small: dict[str, object] = {}

    def begin(self, config, small, folder):
        assert os.environ["TRITON_INTERPRET"] == "1"
        self.small = small
        return self

    def run(self, case: Case) -> Result:
        self.ran.append(case)
        if case == self.fails:
            return Result(case, 1.0, failure="rank 1 was killed")
        taken = {"own": {"compile", "aten"}, "blocked": {"blocked", "aten"}, "triton": {"triton"}}.get(
            case.paths, set()
        )
        return Result(case, 1.0, GRADIENT, 1e-15, taken=frozenset(taken))


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(Proof, "begin", found.begin)
    monkeypatch.setattr(verification, "why_not_interpret", lambda: None)
    return found


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        ({"expert": 2}, 2),
        ({"expert": 2, "tensor": 2}, 4),  # experts are split over tensor ranks too
        ({"expert": 2, "tensor": 2, "expert_tensor": 1}, 2),
        ({"expert": 4, "shard": -1, "replicate": 2, "pipeline": 2, "expert_tensor": 1}, 8),
        ({"shard": 4, "tensor": 2}, 8),
    ],
    ids=str,
)
def test_by_default_a_world_has_room_for_the_experts(parallel, num_ranks):
    parallel = {"shard": -1, "sequence": "tensor" in parallel, **parallel}
    config = load_run("moe-tiny", [f"parallel.{name}={str(degree).lower()}" for name, degree in parallel.items()])
    assert verification._ranks_needed(config) == num_ranks


def test_every_layout_is_run_in_float64_and_a_compiler_waited_for_in_a_few():
    rows = cover(dict.fromkeys(("tensor", "context", "pipeline", "shard"), (2,)))
    planned = list(cases(rows))
    for path in ("reference", "blocked"):
        assert [case.degrees for case in planned if case.paths == path and case.degrees] == rows
    slow = [(case.degrees, case.dtype) for case in planned if case.paths == "own"]
    assert slow == [({}, "float32"), ({"tensor": 2, "context": 2}, "float32"), ({"tensor": 2}, "float64")]


def test_ranks_that_share_experts_are_run_on_the_paths_of_a_run():
    rows = cover(dict.fromkeys(("pipeline", "shard", "expert"), (2,)))
    sharing, slow = {"shard": 2, "expert": 2}, ("own", "triton")
    planned = [(case.degrees, case.dtype, case.paths) for case in cases(rows) if case.paths in slow]
    assert (sharing, "float32", "own") in planned
    assert (sharing, "float32", "triton") in planned
    assert all(is_layout(degrees) for degrees, _, _ in planned)


def test_a_recipe_of_one_rank_is_run_on_every_path():
    assert {case.paths for case in cases([])} >= {"reference", "blocked", "own"}
    assert all(case.degrees == {} for case in cases([]))


def test_nothing_is_left_to_tell_where_all_was_shown(recorded):
    told: list[str] = []
    one_axis = ["parallel.tensor=2", "parallel.shard=1", "precision.dtype=float32"]
    found = verify("llama-4m", one_axis, None, told.append)
    assert (found.fault, list(found.uncovered)) == (None, [])
    assert len(found.results) == len(recorded.ran) == len(told) - 1
    assert "TRITON_INTERPRET" in os.environ  # these tests set it


def test_what_cannot_be_shown_is_told(recorded, monkeypatch):
    monkeypatch.setattr(verification, "why_not_interpret", lambda: "no triton here")
    idle = "optim.overrides=[{match: '*layers.3*', max_lr: 3e-4}, {match: '*norm*', wd_mult: 0.5}]"
    more = ["precision.dtype=bfloat16", "train.compile=true", "experimental=[compile]", idle]
    more += ["train.fused_linear_cross_entropy=true"]
    found = verify("llama-4m", ["parallel.tensor=2", *more], None, str)
    assert list(found.uncovered) == [
        "parallel.shard=-1 takes the remaining ranks of --world; without --world, none remain",
        "optim.overrides, match=*layers.3*: no parameter of the small model matches",
        "path triton: no triton here",
        "precision.dtype=bfloat16: rounding would hide differences; float32 and float64 were run",
        "train.compile=true: each rank compiles its own layers; they were run in eager mode",
        "train.fused_linear_cross_entropy=true: a small micro-batch fits in one chunk of 2048 tokens",
    ]
    assert [one["match"] for one in recorded.small["optim"]["overrides"]] == ["*norm*"]


def test_pairs_that_were_run_on_some_paths_alone_are_told(recorded):
    context = ["parallel.context=4", "parallel.context_method=two_level", "parallel.context_inner=2"]
    heads = ["model.num_attention_heads=8", "model.num_query_groups=2", "precision.dtype=float32"]
    layout = ["parallel.tensor=4", *context, "parallel.replicate=2", "parallel.shard=1"]
    found = verify("llama-4m", [*heads, *layout], None, str)
    with_replicate = "context with replicate, tensor with replicate"
    all_pairs = "context with replicate, tensor with context, tensor with replicate"
    assert list(found.uncovered) == [
        f"float32 on the default paths on this machine: {with_replicate}; covered in float64 on plain torch",
        f"float64 on the default paths on this machine: {all_pairs}; covered in float64 on plain torch",
        f"float32 on Triton kernels: {all_pairs}; covered in float64 on plain torch",
    ]


def test_pairs_that_need_too_many_ranks_are_told(recorded, monkeypatch):
    monkeypatch.setattr(verification, "degrees_to_show", lambda *_: {"tensor": (4,), "replicate": (4,)})
    found = verify("llama-4m", [*OVERRIDES, "parallel.shard=1"], None, str)
    assert "tensor with replicate: together they need more than 8 ranks" in found.uncovered


def test_world_says_what_is_left_for_shard(recorded):
    found = verify("llama-4m", ["parallel.tensor=2"], 8, str)
    assert found.layout == {"tensor": 2, "shard": 4}
    assert not any("--world" in line for line in found.uncovered)


def test_the_settings_of_a_run_are_proven_from_its_folder(recorded, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(load_run("llama-4m", OVERRIDES)))
    found = verify(str(tmp_path), ["parallel.shard=1"], None, str)
    assert found.layout == {"tensor": 2, "replicate": 2}


def test_after_a_run_that_fails_only_smaller_ones_of_its_layout_follow(recorded):
    both = {"tensor": 2, "replicate": 2}
    recorded.fails = Case(both, "float64", "reference")
    found = verify("llama-4m", [*OVERRIDES, "parallel.shard=1"], None, str)
    assert found.fault is not None
    assert found.fault.case == recorded.fails
    smaller = [{}, {"tensor": 2}, {"replicate": 2}]
    assert [case.degrees for case in recorded.ran] == [{}, both, *smaller]


@pytest.mark.parametrize(("numpy", "why"), [("2.3.5", None), ("2.4.0", "needs numpy below 2.4; 2.4 is installed")])
def test_the_interpreter_needs_an_older_numpy(numpy, why, monkeypatch):
    monkeypatch.setattr(optional, "_HAS_TRITON", True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: numpy)
    assert (optional.why_not_interpret() or "").endswith(why or "")
    assert (optional.why_not_interpret() is None) == (why is None)
    monkeypatch.setattr(optional, "_HAS_TRITON", False)
    assert "not installed" in optional.why_not_interpret()
