"""The experimental feature ``compile``: layers through torch.compile compute what they did."""

import shutil

import pytest

from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.on_ranks import first_steps


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True}, {"shard": 2}], ids=str)
def test_compiled_layers_learn_the_same(parallel, tmp_path):
    world_size = 2 if parallel else 1
    plain = settings(tmp_path, parallel=parallel, precision={"dtype": "float32"})
    compiled = {**plain, "train": {**plain["train"], "compile": True}, "experimental": ["compile"]}
    want, got = (ranks(world_size, first_steps, tree, world_size, timeout=300)[0] for tree in (plain, compiled))
    # float32 rounds at 6e-8; sums in another order stray by a few of these
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=1e-4)
