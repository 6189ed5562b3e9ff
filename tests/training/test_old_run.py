"""A run started by an earlier version: its settings and state are read, and it continues as it would have there.

``run_of_0_1`` is the folder of a run of four steps in float64, without dropout, at its second; written by the version
whose layers were numbered, whose state had no version, and whose settings were in two levels. Its losses are below.
"""

import shutil
from pathlib import Path

import pytest

from megalith.config import load_run
from megalith.observe.metrics import read_metrics
from megalith.training.pretrain import pretrain
from tests.rank_pool import ranks
from tests.tiny_run import write_dataset

OLD = Path(__file__).parent / "run_of_0_1"
LOSSES = ["0x1.079068cd0a098p+2", "0x1.0737dd6e280c2p+2", "0x1.0704ea61c38f9p+2", "0x1.06cfc1acc85a8p+2"]
# with weights drawn the current way, each rounded once to float32; in 0.1, the last bits depended on the processor's
# log and cos
NOW = ["0x1.079068cc9f589p+2", "0x1.0737dd6baa77cp+2", "0x1.0704ea61e3a95p+2", "0x1.06cfc1ac823f3p+2"]
ROUNDING = 1e-14  # another processor's matrix products sum in another order


def go_on(config_file: Path, overrides: list[str], world_size: int) -> list[str]:
    """Continues the run; returns what it shows."""
    lines: list[str] = []
    pretrain(load_run(config_file, overrides, world_size=world_size), lines.append, str)
    return lines


@pytest.fixture
def overrides(tmp_path):
    return [f"data.train={write_dataset(tmp_path / 'text')}", f"run={tmp_path / 'run'}"]


def test_it_is_resumed_and_ends_as_it_would_have(tmp_path, overrides):
    shutil.copytree(OLD, tmp_path / "run")
    [lines] = ranks(1, go_on, OLD / "config.yaml", overrides, 1)
    assert lines[1].startswith("the checkpoint was written by an earlier version")
    found = [record["loss"] for record in read_metrics(tmp_path / "run")]
    assert found == pytest.approx([float.fromhex(loss) for loss in LOSSES[2:]], rel=ROUNDING)


def test_started_anew_its_losses_are_those_of_weights_with_other_last_bits(tmp_path, overrides):
    ranks(2, go_on, OLD / "config.yaml", [*overrides, "parallel.tensor=2"], 2)
    found = [record["loss"] for record in read_metrics(tmp_path / "run")]
    assert found == pytest.approx([float.fromhex(loss) for loss in NOW], rel=ROUNDING)
    assert found == pytest.approx([float.fromhex(loss) for loss in LOSSES], rel=1e-9)  # measured: 6e-10
