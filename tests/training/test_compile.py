"""The experimental feature ``compile``: layers through torch.compile compute what they did."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megalith.observe.metrics import read_metrics
from tests.program import ended, start, write_settings
from tests.tiny_run import settings


def losses(tree: dict[str, Any], folder: Path, nproc: int) -> list[float]:
    # in processes of its own: a compiler leaves threads and workers behind, which ranks of other tests would share
    found = ended(start("train", write_settings(tree, folder), "--nproc", nproc), timeout=400)
    assert found.code == 0, found
    return [record["loss"] for record in read_metrics(Path(tree["run"]))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True}], ids=str)
def test_compiled_layers_learn_the_same(parallel, tmp_path):
    nproc = parallel.get("tensor", 1)
    plain = settings(tmp_path, parallel=parallel, precision={"dtype": "float32"}, run=str(tmp_path / "plain"))
    compiled = {**plain, "train": {**plain["train"], "compile": True}, "experimental": ["compile"]}
    compiled["run"] = str(tmp_path / "compiled")
    # float32 rounds at 6e-8; sums in another order stray by a few of these
    assert losses(compiled, tmp_path, nproc) == pytest.approx(losses(plain, tmp_path, nproc), rel=1e-5)
