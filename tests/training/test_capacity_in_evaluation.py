"""Evaluation of experts with a capacity drops tokens as training does, and says so in one line."""

import logging
from pathlib import Path

import pytest
import yaml

from megalith.training.inference import evaluate_checkpoint
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.outcomes import run_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps; an expert's capacity is half of its even share."""
    model = {"moe": {"num_experts": 4, "capacity": {"factor": 0.5}}, "init_method_std": 0.5}
    tree = settings(tmp_path, model=model, train={"steps": 2})
    ranks(1, run_here, tree, 1)
    return Path(tree["run"])


def without_capacity(run: Path) -> None:
    path = run / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    assert tree["model"]["moe"]["capacity"]["factor"] == 0.5
    tree["model"]["moe"]["capacity"] = None
    path.write_text(yaml.safe_dump(tree))


def test_it_drops_past_the_capacity_and_one_line_says_so(run, caplog):
    data = str(run.parent / "text")
    with caplog.at_level(logging.INFO):
        [dropping] = evaluate_checkpoint(run, data, 8)
        [line] = [line for line in caplog.messages if "capacity" in line]
        assert line == (
            "experts drop tokens beyond their capacity, as in training (model.moe.capacity.factor=0.5): the result "
            "depends on the 2 samples of a micro-batch, whose tokens compete for capacity"
        )
        caplog.clear()
        without_capacity(run)
        [whole] = evaluate_checkpoint(run, data, 8)
        assert not [line for line in caplog.messages if "capacity" in line]
    assert abs(dropping.loss - whole.loss) > 1e-3
