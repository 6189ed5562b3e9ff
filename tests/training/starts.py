"""Starts of a run on any ranks, and the resulting files."""

import hashlib
from pathlib import Path

import torch.distributed as dist

from megalith.config import load_run
from megalith.errors import MegalithError
from megalith.training.pretrain import pretrain
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT

# the smallest possible Llama: what these runs learn does not matter
MODEL = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2}


def go_on_with(file: Path, overrides: list[str], task: type[PretrainGPT] = PretrainGPT) -> str:
    """What starting the run prints on this rank, or the error that ends it."""
    config = load_run(file, overrides, world_size=dist.get_world_size())
    lines: list[str] = []
    try:
        pretrain(config, lines.append, str, RunParts(task(config)))
    except MegalithError as error:
        return f"error on every rank: {error}" if error.on_every_rank else f"error of one rank: {error}"
    return "\n".join(lines)


def snapshot(folder: Path) -> dict[str, str]:
    """The hash of every file below ``folder`` except its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
