"""Writes the result of every conversion to a run: a folder at step 0 for training, evaluation and generation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megalith.checkpoint.save import save_checkpoint
from megalith.config import RunConfig, dump_yaml
from megalith.data.tokenizer import Tokenizer
from megalith.observe.machine import describe_machine
from megalith.storage import write_json_atomic, write_text_atomic
from megalith.training.kept import keep
from megalith.training.state import STATE_VERSION, TrainState

__all__ = ["write_new_run"]


def write_new_run(
    folder: Path,
    config: RunConfig,
    described: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    *,
    tokenizer: Tokenizer | None,
    companions: Mapping[str, bytes] = MappingProxyType({}),
    about: Mapping[str, Any],
    state: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fills ``folder``: config.yaml, about.json, the tokenizer, and weights as the checkpoint of step 0.

    Args:
        described: the weights by name, on meta.
        read: returns one of them, as described, when it is written; one is in memory at a time.
        companions: files next to the tokenizer in a Hugging Face folder, by name.
        about: the content of about.json besides the machine.
        state: the content of the checkpoint's state besides that no step was made.
        progress: called with the bytes of weights read so far and the total.

    Raises as ``save_checkpoint`` does.
    """
    done, num_bytes = 0, sum(tensor.nbytes for tensor in described.values())

    def told(name: str) -> Tensor:
        nonlocal done
        progress(done, num_bytes)
        done += described[name].nbytes
        return read(name)

    at_step_0 = {"version": STATE_VERSION, "train": TrainState().state_dict()}
    save_checkpoint(folder / "checkpoints", 0, described, {**at_step_0, **(state or {})}, keep_last=1, read=told)
    progress(num_bytes, num_bytes)
    keep(folder, tokenizer, companions)
    write_text_atomic(folder / "config.yaml", dump_yaml(config))
    write_json_atomic(folder / "about.json", {**about, **describe_machine()})
