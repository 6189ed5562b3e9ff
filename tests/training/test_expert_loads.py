"""expert_loads: the numbers of a run with experts in metrics.jsonl, by hand, and the alarm of a run that collapses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import MoEConfig, load_run
from megalith.observe.metrics import read_metrics
from megalith.parallel.parameters import local
from megalith.training.expert_loads import experts_record, sign_of_collapse
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


class SendAllToTwo(Callback):
    """After step 3 every router sends every token to experts 0 and 1."""

    def on_step(self, run: Any, finished: Any) -> None:
        if run.state.step == 3:
            for chunk in run.chunks:
                for router in chunk.routers().values():
                    with torch.no_grad():
                        local(router.bias)[:2] = 100.0


def train(tree: dict[str, Any], world_size: int, collapses: bool) -> list[str]:
    config = load_run(tree, world_size=world_size)
    lines: list[str] = []
    parts = RunParts(PretrainGPT(config), callbacks=[SendAllToTwo()] if collapses else [])
    pretrain(config, lines.append, lines.append, parts)
    return lines


def run_of(tmp_path: Path, steps: int, **groups: Any) -> dict[str, Any]:
    return settings(tmp_path, model={"moe": {"num_experts": E, "router": ROUTER}}, train={"steps": steps}, **groups)


def test_a_collapse_is_told_once_within_ten_steps(tmp_path):
    tree = run_of(tmp_path, 16)
    ranks(1, train, tree, 1, True)
    log = (Path(tree["run"]) / "logs" / "run.log").read_text()
    [line] = [line for line in log.splitlines() if "collapsed" in line]
    assert "step 8: the routing has collapsed" in line  # from step 4 on, for five steps
    assert "layer 0: max violation 3.00, where 3.00 is the greatest possible; layer 1: max violation 3.00" in line
    for way_out in ("sequence_balance", "expert_bias_update_rate", "z_loss", "optim.lr"):
        assert way_out in line


def test_a_healthy_run_has_no_alarm_and_its_numbers_are_in_the_metrics(tmp_path):
    tree = run_of(tmp_path, 12, parallel={"pipeline": 2})
    tree["train"]["log_every"] = 5
    lines, _ = ranks(2, train, tree, 2, False)
    assert "collapsed" not in (Path(tree["run"]) / "logs" / "run.log").read_text()
    records = read_metrics(Path(tree["run"]))
    assert [record["step"] for record in records if "experts" in record] == [1, 5, 10, 12]
    assert sum("max violation" in line for line in lines) == 4
    experts = records[-1]["experts"]
    assert [layer["layer"] for layer in experts["layers"]] == [0, 1]  # of both stages
    for layer in experts["layers"]:
        assert sum(layer["load"]) == pytest.approx(E, abs=E * 0.0005)
        assert layer["max_violation"] == pytest.approx(max(layer["load"]) - 1, abs=0.0005)
        assert set(layer["losses"]) == {"sequence_balance", "z_loss"}
        # of 11 updates of at most 0.02 between two experts; steps move by 0.01 less the mean of all steps
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


@pytest.mark.parametrize(
    ("load", "sign"),
    [
        ([512, 512, 0, 0, 0, 0, 0, 0], "max violation 3.00"),
        ([260, 200, 200, 364, 0, 0, 0, 0], None),  # half are in use
        ([260, 400, 364, 0, 0, 0, 0, 0], "5 of 8 experts were chosen by no token"),
        ([440, 440, 40, 40, 16, 16, 16, 16], None),
        ([470, 470, 80, 1, 1, 1, 1, 0], "entropy 0.94, as if 2.6 of 8"),
        ([128] * 8, None),
        ([5, 5, 0, 0, 0, 0, 0, 0], None),  # too few tokens to tell
    ],
)
def test_what_counts_as_a_collapse(load, sign):
    found = sign_of_collapse(torch.tensor(load), MoEConfig(num_experts=E, top_k=K))
    assert (found is None) if sign is None else (found is not None and sign in found), found


def test_where_every_token_has_all_experts_nothing_collapses():
    assert sign_of_collapse(torch.tensor([SEQ * 8] * 2), MoEConfig(num_experts=2, top_k=2)) is None
