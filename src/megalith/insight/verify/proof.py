"""Runs a small recipe in small layouts of ranks on this machine, and compares each run with one process."""

import pickle
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import torch

from megalith.config import RunConfig, load_run
from megalith.errors import RankFailedError
from megalith.fusions.core.names import Backend
from megalith.fusions.core.preference import prefer
from megalith.insight.verify.compare import BOUNDS, Errors, errors, expected, first_beyond, merged
from megalith.insight.verify.cover import Degrees, is_layout, num_ranks
from megalith.insight.verify.record import Key, record_steps
from megalith.insight.verify.shrink import Tree, on_layout, on_one_process
from megalith.insight.verify.small_data import write_data
from megalith.resilience.call_ranks import call_ranks
from megalith.training.process_group import process_group

__all__ = ["Case", "Paths", "Proof", "Result", "narrowed"]

# paths of fused operations: plain torch, those of a run on this machine, or one path for all operations that have it
Paths = Literal["reference", "own", "blocked", "triton"]
_PREFERRED: dict[Paths, tuple[Backend, ...]] = {"own": (), "blocked": ("blocked",), "triton": ("triton",)}


@dataclass(frozen=True)
class Case:
    """A run to compare with one process: its layout, dtype and paths."""

    degrees: Degrees
    dtype: Literal["float64", "float32"]
    paths: Paths


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        worst: the entry with the largest error, modules excluded, and ``error`` its error; if only modules exceed the
            bound, the first of them; None if the run failed.
        first: the first entry, in causal order and including modules, whose error exceeds the bound, and that error.
        failure: why the run did not finish.
        taken: the paths that operations have taken.
    """

    case: Case
    seconds: float
    worst: Key | None = None
    error: float = 0.0
    first: tuple[Key, float] | None = None
    failure: str | None = None
    taken: frozenset[Backend] = frozenset()

    @property
    def same(self) -> bool:
        """Whether the numbers equal those of one process."""
        return self.first is None and self.failure is None


@dataclass(frozen=True)
class Proof:
    """A small recipe, its data, and the record of one process.

    Attributes:
        config: the user's recipe, which has the settings for each axis.
        small: the small recipe.
        reference: file with the record of one process.
        keys: the entries of that record, in causal order.
    """

    config: RunConfig
    small: Tree
    reference: Path
    keys: Sequence[Key]

    @classmethod
    def begin(cls, config: RunConfig, small: Tree, folder: Path) -> "Proof":
        """Writes a dataset into ``folder``, trains in one process, and stores its record there.

        Raises:
            RankFailedError: that process fails.
        """
        small = {**small, "data": {**small["data"], "train": str(folder / "text")}, "run": str(folder / "run")}
        write_data(folder / "text", small)
        reference = folder / "reference"
        one_process = {**on_one_process(small), "precision": {"dtype": "float64"}}
        [keys] = call_ranks(1, _record, load_run(one_process, world_size=1), reference)
        return cls(config, small, reference, keys)

    def run(self, case: Case) -> Result:
        """Runs ``case`` on newly started ranks."""
        started = time.monotonic()
        size = num_ranks(case.degrees)
        config = load_run(on_layout(self.small, self.config, case.degrees, case.dtype), world_size=size)
        try:
            answers = call_ranks(size, _compare, config, case, self.reference)
        except RankFailedError as error:
            return Result(case, time.monotonic() - started, failure=str(error))
        found = merged(of_rank for of_rank, _ in answers)
        taken = frozenset(path for _, of_rank in answers for _, path in of_rank)
        return self._judged(case, found, taken, time.monotonic() - started)

    def _judged(self, case: Case, found: Errors, taken: frozenset[Backend], seconds: float) -> Result:
        bound = BOUNDS[case.dtype].error
        wanted = expected(self.keys, case.dtype)
        left_out = {key for key in self.keys if key.kind != "module"} - set(wanted)
        # an entry that no rank has counts as an infinite error
        found = {**dict.fromkeys(wanted, float("inf")), **found}
        promised = {key: error for key, error in found.items() if key.kind != "module" and key not in left_out}
        worst = max(promised, key=lambda key: promised[key])
        first = first_beyond(found, [key for key in self.keys if key not in left_out], bound)
        if first is None and not promised[worst] < bound:
            first = worst  # an entry that the record of one process does not have
        elif first is not None and promised[worst] < bound:
            worst = first  # a module
        return Result(case, seconds, worst, found[worst], None if first is None else (first, found[first]), taken=taken)


def narrowed(proof: Proof, result: Result) -> Result:
    """Returns the first wrong result of layouts with fewer of the axes of ``result``, fewest first, or ``result``."""
    case = result.case
    for size in range(len(case.degrees)):
        fewer_axes = ({axis: case.degrees[axis] for axis in axes} for axes in combinations(case.degrees, size))
        for degrees in filter(is_layout, fewer_axes):
            fewer = proof.run(Case(degrees, case.dtype, case.paths))
            if not fewer.same:
                return fewer
    return result


def _record(config: RunConfig, file: Path) -> list[Key]:
    """Runs in one process: writes its record to ``file``; returns the keys of its entries."""
    with process_group(torch.device("cpu")):
        record = record_steps(config)
    file.write_bytes(pickle.dumps(record))
    return list(record)


def _compare(config: RunConfig, case: Case, reference: Path) -> tuple[Errors, set[tuple[str, Backend]]]:
    """Runs on each rank: returns the errors of its record, and which operation took which path."""
    choice = nullcontext(set[tuple[str, Backend]]()) if case.paths == "reference" else prefer(*_PREFERRED[case.paths])
    with process_group(torch.device("cpu")), choice as taken:
        found = record_steps(config)
    return errors(found, pickle.loads(reference.read_bytes()), case.dtype), taken
