"""Every accepted layout can be built: no rank finds out later that something does not divide.

Ranks use torch's fake process group, whose collectives do nothing, so that one process can act as any of them.
"""

import random
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # importing it registers the backend

from megalith.config import RunConfig, load_run
from megalith.errors import ConfigError
from megalith.training.setup import build_run
from tests.rank_pool import fork_context
from tests.tiny_run import GPT2, LLAMA, settings

DEGREES = ("tensor", "context", "pipeline", "replicate", "shard")


def drawn(source: random.Random, folder: Path) -> tuple[RunConfig, int] | None:
    """A random run and its number of ranks, with sizes that few degrees divide; None if its settings are refused."""
    one = source.choice
    parallel: dict[str, Any] = {
        "tensor": one([1, 1, 2, 3, 4]),
        "context": one([1, 1, 2]),
        "pipeline": one([1, 1, 2]),
        "replicate": one([1, 2]),
        "shard": one([1, 2, 3, 4, 8]),
        "expert": one([1, 2, 3, 4]),
        "expert_tensor": one([None, 1, 2]),
    }
    parallel["sequence"] = parallel["tensor"] > 1
    heads = one([2, 3, 4, 6, 8])
    moe = {
        "num_experts": one([2, 3, 4, 8]),
        "ffn_hidden_size": one([5, 6, 12, 48]),
        "latent_size": one([None, None, 6, 7, 10]),
        "shared_ffn_hidden_size": one([None, 6, 7, 24]),
    }
    model = {
        **one([LLAMA, GPT2]),
        "hidden_size": heads * one([2, 4, 6, 8]),
        "num_attention_heads": heads,
        "num_query_groups": one([heads, 1, 2]),
        "ffn_hidden_size": one([12, 30, 48]),
        "mlp_bias": one([True, False]),
        "moe": one([None, moe]),
    }
    world_size = prod(parallel[name] for name in DEGREES)
    tree = settings(
        folder,
        data={"seq_length": 48},
        train={"global_batch_size": 4 * parallel["replicate"] * parallel["shard"], "micro_batch_size": 1},
    )
    try:
        return load_run(tree | {"model": model, "parallel": parallel}, world_size=world_size), world_size
    except ConfigError:
        return None


def built(seed: int, folder: Path) -> str:
    """What goes wrong on one rank of an accepted run; "" if nothing does."""
    source = random.Random(seed)
    while (found := drawn(source, folder)) is None:
        pass
    config, world_size = found
    dist.init_process_group("fake", rank=source.randrange(world_size), world_size=world_size, store=dist.HashStore())
    # a single rank cannot compare names with others
    with patch("megalith.training.build_model._require_names_of_their_own", lambda *_, **__: None):
        try:
            build_run(config, torch.device("cpu"))
        except Exception as error:  # whatever a rank may raise
            return f"{type(error).__name__}: {error}; {config.parallel}, {config.model}"
    return ""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_every_layout_that_is_accepted_can_be_built(seed, tmp_path):
    settings(tmp_path)  # writes the dataset
    # a process for each, because torch caches by the ranks of a mesh
    with fork_context().Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(built, [(20 * seed + number, tmp_path) for number in range(20)], chunksize=1)
    assert [each for each in found if each] == []
