"""Times saving and loading a checkpoint on this machine's CPU and disk, beside torch's and safetensors' ways.

    python -m benchmarks.checkpoints                       # 1 GiB of state, five rounds, a few minutes
    python -m benchmarks.checkpoints --gib 4 --folder /data

The state is that of training: weights and two moments in float32, in one process. Every saved file is on disk (fsync)
when a save counts as complete; Megalith's is also hashed (SHA-256), and verified when it is loaded. Rounds are
interleaved, and a round begins with a plain file of the same size, written with fsync and read back, which shows what
the disk does. Files are read from the page cache. The table is printed, and saved in ``benchmarks/results`` (``--out``)
as ``checkpoints-<date>.md``.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.environment import describe
from megalith.checkpoint import BackgroundSaver, load_tensors, save_checkpoint

__all__ = ["CONTENDERS", "Contender", "State", "Times", "as_markdown", "main", "measured", "state_of"]

RESULTS = Path(__file__).parent / "results"
_LARGEST = 16 << 20  # elements of a tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Times:
    """Seconds that training waits for a save, seconds until it is complete, and seconds of loading it."""

    waits: float
    complete: float
    load: float


@dataclass(frozen=True)
class Contender:
    """``begin`` starts to save a state in a folder and returns what waits until it is complete; ``load`` fills one."""

    name: str
    begin: Callable[[State, Path], Callable[[], object]]
    load: Callable[[State, Path], object]


def main() -> None:
    """Measures all contenders and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description="Times saving and loading.")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state in GiB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all contenders (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder for temporary files)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1 or options.gib <= 0.0:
        parser.error(f"--rounds must be at least 1 and --gib above 0; got {options.rounds} and {options.gib}")
    state = state_of(int(options.gib * 2**30))
    found: dict[str, list[Times]] = {each.name: [] for each in CONTENDERS}
    for number in range(options.rounds + 1):
        for each in CONTENDERS:
            times = measured(each, state, options.folder)
            print(f"round {number}: {each.name}: {times.waits:.2f} s", file=sys.stderr, flush=True)
            if number:  # round 0 allocates what later rounds reuse, such as copies that are kept
                found[each.name].append(times)
    now, num_bytes = datetime.now(), sum(tensor.nbytes for tensor in state.values())
    table = as_markdown(found, num_bytes, describe(), f"{now:%Y-%m-%d %H:%M}")
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"checkpoints-{now:%Y%m%d-%H%M}.md").write_text(table)


def state_of(num_bytes: int) -> State:
    """Random weights and moments of about ``num_bytes``, in tensors of the sizes of a small Llama."""
    sizes, left = [], num_bytes // 12
    while left:
        sizes.append(min(left, (_LARGEST, _LARGEST // 4, _LARGEST // 4096)[len(sizes) % 3]))
        left -= sizes[-1]
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {f"{kind}.{number}": torch.randn(size) for kind in kinds for number, size in enumerate(sizes)}


def measured(contender: Contender, state: State, folder: Path | None) -> Times:
    """Saves and loads ``state`` once; raises RuntimeError if another state is loaded than was saved."""
    with tempfile.TemporaryDirectory(prefix="megalith-checkpoints-", dir=folder) as place:
        os.sync()  # what other contenders have left to write
        started = perf_counter()
        finish = contender.begin(state, Path(place))
        waits = perf_counter() - started
        finish()
        complete = perf_counter() - started
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        started = perf_counter()
        contender.load(into, Path(place))
        load = perf_counter() - started
        if wrong := [name for name, tensor in state.items() if not torch.equal(into[name], tensor)]:
            raise RuntimeError(f"{contender.name} has loaded other values of {', '.join(wrong[:3])}")
        return Times(waits, complete, load)


def as_markdown(found: Mapping[str, Sequence[Times]], num_bytes: int, machine: Mapping[str, str], date: str) -> str:
    """Title, table of medians over the rounds, and the machine."""
    rows = []
    for name, times in found.items():
        waits, complete, load = (
            statistics.median(getattr(each, part) for each in times) for part in ("waits", "complete", "load")
        )
        plain = statistics.median(one.complete / each.complete for one, each in zip(found[PLAIN], times, strict=True))
        rows.append(f"| {name} | {waits:.2f} | {complete:.2f} | {plain:.2f} | {load:.2f} |")
    title = f"## Saving and loading {num_bytes / 2**30:.2f} GiB in one process, {date}"
    heads = "| way | training waits, s | complete, s | of a plain write | load, s |"
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    return "\n".join([title, "", heads, "| --- | --- | --- | --- | --- |", *rows, "", about, ""])


def _nothing() -> None:
    """For a save that is complete when it returns."""


def _synced(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _write_plain(state: State, folder: Path) -> Callable[[], object]:
    with (folder / "state").open("wb") as file:
        for tensor in state.values():
            file.write(memoryview(tensor.numpy()).cast("B"))
    _synced(folder / "state")
    return _nothing


def _read_plain(into: State, folder: Path) -> None:
    with (folder / "state").open("rb") as file:
        for tensor in into.values():
            file.readinto(memoryview(tensor.numpy()).cast("B"))


def _save(state: State, folder: Path) -> Callable[[], object]:
    save_checkpoint(folder, 1, state, {"step": 1}, keep_last=1)
    return _nothing


def _load(into: State, folder: Path) -> None:
    load_tensors(folder / "step-00000001", into)


_saver = BackgroundSaver(lambda step, path, seconds: None)


def _save_in_the_background(state: State, folder: Path) -> Callable[[], object]:
    _saver.save(folder, 1, state, {"step": 1}, keep_last=1)
    return _saver.wait


def _save_pickled(state: State, folder: Path) -> Callable[[], object]:
    torch.save(state, folder / "state")
    _synced(folder / "state")
    return _nothing


def _load_pickled(into: State, folder: Path) -> None:
    for name, tensor in torch.load(folder / "state", weights_only=True).items():
        into[name].copy_(tensor)


def _save_safetensors(state: State, folder: Path) -> Callable[[], object]:
    save_file(state, folder / "state")
    _synced(folder / "state")
    return _nothing


def _load_safetensors(into: State, folder: Path) -> None:
    for name, tensor in load_file(folder / "state").items():
        into[name].copy_(tensor)


def _save_dcp(state: State, folder: Path) -> Callable[[], object]:
    dcp.save(dict(state), checkpoint_id=folder / "state", no_dist=True)
    return _nothing


def _save_dcp_async(state: State, folder: Path) -> Callable[[], object]:
    saving: Any = dcp.async_save(dict(state), checkpoint_id=folder / "state", no_dist=True)
    return partial(saving.result)


def _load_dcp(into: State, folder: Path) -> None:
    dcp.load(dict(into), checkpoint_id=folder / "state", no_dist=True)


PLAIN = "plain file, fsync"
CONTENDERS = (
    Contender(PLAIN, _write_plain, _read_plain),
    Contender("Megalith", _save, _load),
    Contender("Megalith, checkpoint.async_save", _save_in_the_background, _load),
    Contender("torch.save, fsync", _save_pickled, _load_pickled),
    Contender("safetensors, fsync", _save_safetensors, _load_safetensors),
    Contender("torch.distributed.checkpoint", _save_dcp, _load_dcp),
    Contender("torch.distributed.checkpoint.async_save", _save_dcp_async, _load_dcp),
)


if __name__ == "__main__":
    main()
