"""expert_loads: expert statistics in metrics.jsonl, by hand, and the warning about a collapsed routing."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import MoEConfig, load_run
from megalith.observe.metrics import read_metrics
from megalith.parallel.parameters import local
from megalith.training.expert_loads import experts_record, sign_of_imbalance
from megalith.training.loop import Callback
from megalith.training.pretrain import pretrain
from megalith.training.routing import RoutingTotals
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings

E, K = 8, 2
ROUTER = {
    "score_function": "sigmoid",
    "bias": True,
    "expert_bias_update_rate": 0.01,
    "sequence_balance": 0.01,
    "z_loss": 0.001,
}


class SendAllTo(Callback):
    """After step 3, every router sends every token to the first ``num_experts`` experts."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def on_step(self, run: Any, finished: Any) -> None:
        if run.state.step == 3:
            for chunk in run.chunks:
                for router in chunk.routers().values():
                    with torch.no_grad():
                        local(router.bias)[: self.num_experts] = 100.0


def train(tree: dict[str, Any], world_size: int, to: int | None = None) -> list[str]:
    config = load_run(tree, world_size=world_size)
    lines: list[str] = []
    parts = RunParts(PretrainGPT(config), callbacks=[] if to is None else [SendAllTo(to)])
    pretrain(config, lines.append, lines.append, parts)
    return lines


def run_of(tmp_path: Path, steps: int, **groups: Any) -> dict[str, Any]:
    return settings(tmp_path, model={"moe": {"num_experts": E, "router": ROUTER}}, train={"steps": steps}, **groups)


def test_a_collapse_is_told_once_within_ten_steps(tmp_path):
    tree = run_of(tmp_path, 16)
    ranks(1, train, tree, 1, 2)
    log = (Path(tree["run"]) / "logs" / "run.log").read_text()
    [line] = [line for line in log.splitlines() if "steps in a row" in line]
    assert "step 8: the routing has collapsed, now for 5 steps in a row" in line  # from step 4 on
    shown = "entropy 0.69, as if 2.0 of 8 experts were in use"  # log 2
    assert f"layer 0: {shown}; layer 1: {shown}" in line
    for way_out in ("sequence_balance", "expert_bias_update_rate", "z_loss", "optim.lr"):
        assert way_out in line


def test_one_hot_expert_beside_others_in_use_is_told_in_words_of_its_own(tmp_path):
    tree = run_of(tmp_path, 16)
    ranks(1, train, tree, 1, 1)
    log = (Path(tree["run"]) / "logs" / "run.log").read_text()
    [line] = [line for line in log.splitlines() if "steps in a row" in line]
    assert "step 8: nearly every token has chosen the same expert for 5 steps in a row" in line
    assert "layer 0: 100% of the tokens chose expert 0; with the other choices, it is as if 5." in line
    assert "The routing has not collapsed, but ranks of parallel.expert wait for that expert" in line
    layers = read_metrics(Path(tree["run"]))[-1]["experts"]["layers"]
    # its max violation is that of a collapse, E / K - 1
    assert [layer["max_violation"] for layer in layers] == [3.0, 3.0]


def test_a_healthy_run_has_no_alarm_and_its_numbers_are_in_the_metrics(tmp_path):
    tree = run_of(tmp_path, 12, parallel={"pipeline": 2})
    tree["train"]["log_every"] = 5
    lines, _ = ranks(2, train, tree, 2)
    assert "steps in a row" not in (Path(tree["run"]) / "logs" / "run.log").read_text()
    records = read_metrics(Path(tree["run"]))
    assert [record["step"] for record in records if "experts" in record] == [1, 5, 10, 12]
    assert sum("max violation" in line for line in lines) == 4
    experts = records[-1]["experts"]
    assert [layer["layer"] for layer in experts["layers"]] == [0, 1]  # of both stages
    for layer in experts["layers"]:
        assert sum(layer["load"]) == pytest.approx(E, abs=E * 0.0005)
        assert layer["max_violation"] == pytest.approx(max(layer["load"]) - 1, abs=0.0005)
        assert set(layer["losses"]) == {"sequence_balance", "z_loss"}
        # 11 updates of at most 0.02 between two experts; each step moves by 0.01 minus the mean of all steps
        assert 0.0 < layer["bias_range"] <= 11 * 0.02 + 1e-6
    assert experts["max_violation"] == max(layer["max_violation"] for layer in experts["layers"])
    assert experts["bias_range"] == max(layer["bias_range"] for layer in experts["layers"])


def test_the_numbers_of_a_record_are_those_of_its_loads():
    even, uneven = torch.full((4,), 6), torch.tensor([12, 12, 0, 0])
    totals = RoutingTotals(
        loads={1: even, 3: uneven}, losses={1: {"z_loss": 2.0}, 3: {"z_loss": math.nan}}, bias_ranges={3: 0.25}
    )
    record = experts_record(totals)
    assert record["max_violation"] == 1.0
    assert record["entropy"] == pytest.approx(math.log(2))
    assert record["dead_experts"] == 2
    assert math.isnan(record["z_loss"])
    first, second = record["layers"]
    assert first["load"] == [1.0, 1.0, 1.0, 1.0]
    assert second["load"] == [2.0, 2.0, 0.0, 0.0]
    assert (first["losses"], second["losses"]) == ({"z_loss": 2.0}, {"z_loss": None})  # JSON has no NaN in lists
    assert (first["bias_range"], second["bias_range"]) == (None, 0.25)


def test_a_layer_of_many_experts_takes_64_numbers():
    load = torch.arange(256)
    [layer] = experts_record(RoutingTotals(loads={0: load}))["layers"]
    assert len(layer["load"]) == 64
    assert layer["load"][:2] == [round(1.5 / 127.5, 3), round(5.5 / 127.5, 3)]
    # where a bar stands for several experts, the least load is recorded too, so that a mean does not hide a dead one
    assert layer["least"][:3] == [0.0, round(4 / 127.5, 3), round(8 / 127.5, 3)]
    [layer] = experts_record(RoutingTotals(loads={0: load[:64]}))["layers"]
    assert "least" not in layer


@pytest.mark.parametrize(
    ("load", "kind", "numbers"),
    [
        ([512, 512, 0, 0, 0, 0, 0, 0], "collapsed", "as if 2.0 of 8"),
        ([260, 200, 200, 364, 0, 0, 0, 0], None, ""),  # half are in use
        ([260, 400, 364, 0, 0, 0, 0, 0], "collapsed", "5 of 8 experts received no tokens"),
        ([440, 440, 40, 40, 16, 16, 16, 16], None, ""),
        ([470, 470, 80, 1, 1, 1, 1, 0], "collapsed", "entropy 0.94, as if 2.6 of 8"),
        # max violation 3, as in the first case; exp(log(2) / 2 + log(14) / 2) = sqrt(28) experts
        ([511, 73, 73, 73, 73, 73, 73, 73], "hot", "100% of the tokens chose expert 0; with .* as if 5.3 of 8"),
        ([73, 73, 490, 73, 73, 73, 73, 94], "hot", "96% of the tokens chose expert 2"),
        ([73, 73, 440, 73, 73, 73, 100, 119], None, ""),
        ([128] * 8, None, ""),
        ([5, 5, 0, 0, 0, 0, 0, 0], None, ""),  # too few tokens to tell
    ],
)
def test_what_counts_as_a_collapse_and_what_as_a_hot_expert(load, kind, numbers):
    sign = sign_of_imbalance(torch.tensor(load), MoEConfig(num_experts=E, top_k=K))
    if kind is None:
        assert sign is None
    else:
        assert sign is not None
        assert sign.kind == kind
        assert re.search(numbers, sign.numbers)


def test_of_one_expert_for_each_token_a_hot_one_is_a_collapse():
    moe = MoEConfig(num_experts=4, top_k=1)
    assert sign_of_imbalance(torch.tensor([930, 24, 23, 23]), moe) == ("collapsed", "93% of the tokens chose expert 0")


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2), (8, 7), (64, 6), (256, 8)])
def test_choices_by_chance_show_nothing(num_experts, top_k):
    moe, random = MoEConfig(num_experts=num_experts, top_k=top_k), torch.Generator().manual_seed(0)
    for num_tokens in (1, 4, 9, 16, 40, 100, 260, 1000):
        for _ in range(50):
            chosen = torch.rand(num_tokens, num_experts, generator=random).topk(top_k).indices
            load = torch.bincount(chosen.flatten(), minlength=num_experts)
            assert sign_of_imbalance(load, moe) is None


def test_where_every_token_has_all_experts_nothing_collapses():
    assert sign_of_imbalance(torch.tensor([SEQ * 8] * 2), MoEConfig(num_experts=2, top_k=2)) is None
