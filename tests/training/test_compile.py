"""The experimental feature ``compile``: layers under torch.compile compute the same."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalith.observe.metrics import read_metrics
from tests.program import start, write_settings
from tests.tiny_run import GPT2, settings
from tests.training.model_options_attn import ALL_AT_ONCE
from tests.training.model_options_mla import latent

# dropout whose masks each layer draws under its own name, in more layers than torch caches variants of code for
DROPOUT = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None, "num_layers": 10}
# what a router does in training
ROUTER = {
    "score_function": "sigmoid",
    "num_groups": 2,
    "group_topk": 1,
    "expert_bias_update_rate": 1e-2,
    "sequence_balance": 1e-2,
    "z_loss": 1e-3,
    "jitter": 0.01,
}
EXPERTS = {"num_layers": 1, "moe": {"num_experts": 4, "shared_ffn_hidden_size": 16, "router": ROUTER}}
ATTENTION = {"attention": ALL_AT_ONCE, "init_method_std": 0.2}


def losses(tree: dict[str, Any], folder: Path, nproc: int) -> list[float]:
    # in its own processes: a compiler leaves threads and workers behind that would affect other tests
    found = start("train", write_settings(tree, folder), "--nproc", nproc).ended(timeout=400)
    assert found.code == 0, found
    return [record["loss"] for record in read_metrics(Path(tree["run"]))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({}, {}),
        ({"tensor": 2, "sequence": True}, {}),
        ({"tensor": 2}, DROPOUT),
        ({"context": 2}, {}),
        ({"pipeline": 2}, {}),
        ({"tensor": 2}, ATTENTION),
        ({"tensor": 2, "sequence": True}, latent(8)["model"]),
        ({}, EXPERTS),
        ({"expert": 2}, EXPERTS),
    ],
    ids=str,
)
def test_compiled_layers_learn_the_same(parallel, model, tmp_path):
    nproc = prod(parallel.get(axis, 1) for axis in ("tensor", "context", "pipeline", "expert"))
    plain = settings(
        tmp_path, model=model, parallel=parallel, precision={"dtype": "float32"}, run=str(tmp_path / "plain")
    )
    compiled = {**plain, "train": {**plain["train"], "compile": True}, "experimental": ["compile"]}
    compiled["run"] = str(tmp_path / "compiled")
    # float32 rounds at 6e-8; sums in another order differ by a few of these
    assert losses(compiled, tmp_path, nproc) == pytest.approx(losses(plain, tmp_path, nproc), rel=1e-5)
