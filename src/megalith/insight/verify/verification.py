"""Verifies a recipe: plans the small runs, collects their results, and lists what they could not show."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch

from megalith.config import ParamGroupOverride, RunConfig, load_run
from megalith.fusions.core.compiler import why_not_compile
from megalith.fusions.core.dispatch import Backend
from megalith.insight.verify.cover import (
    AXES,
    FOLDED,
    MOST_RANKS,
    Degrees,
    axes_of,
    cover,
    degrees_to_show,
    missing_pairs,
    name_of,
    num_ranks,
)
from megalith.insight.verify.experts import experts_not_shown
from megalith.insight.verify.proof import Case, Paths, Proof, Result, narrowed
from megalith.insight.verify.shrink import Tree, on_layout, on_one_process, small_recipe
from megalith.insight.verify.stacks import stacks_not_shown
from megalith.optim.optimizer import matches
from megalith.optional import why_not_interpret
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import declared_parameters
from megalith.resilience.stop_signals import ended_by_exception
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.preflight import resolve_run_folder
from megalith.training.tasks.choose import task_of

__all__ = ["Verification", "cases", "verify"]

# environment variables that are read once, when a process imports torch and megalith
_OF_RANKS = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise each rank starts a pool of compile workers
    "TRITON_INTERPRET": "1",  # kernels run without a GPU
}
_IN_WORDS: dict[Paths, str] = {
    "reference": "plain torch",
    "blocked": "plain torch in blocks",
    "own": "the default paths on this machine",
    "triton": "Triton kernels",
}


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        layout: the degrees of the user's run that are above 1.
        small: description of the reduced recipe.
        results: result of each small run.
        fault: result of the smallest layout that was found to differ; None if all numbers are the same.
        uncovered: what the small runs could not show, one line each.
    """

    layout: Degrees
    small: str
    results: Sequence[Result]
    fault: Result | None
    uncovered: Sequence[str]


def verify(
    source: str, overrides: Sequence[str], world_size: int | None, progress: Callable[[str], None]
) -> Verification:
    """Verifies the recipe or run ``source`` with ``overrides`` on ``world_size`` ranks, by default as few as possible.

    Does not read its data or checkpoints. ``progress`` receives progress lines.

    Raises:
        ConfigError: the recipe is not valid.
        RankFailedError: the reference run in one process fails.
    """
    source, overrides = resolve_run_folder(source, overrides)
    config = load_run(source, overrides)
    uncovered = []
    if world_size is None and config.parallel.shard == -1:
        uncovered.append("parallel.shard=-1 takes the remaining ranks of --world; without --world, none remain")
    world_size = world_size or _ranks_needed(config)
    config = load_run(source, overrides, world_size=world_size)
    layout = config.parallel.layout(world_size)
    shown = degrees_to_show(config, layout)
    rows = cover(shown)
    small = small_recipe(config, layout, shown, rows)
    uncovered += _leave_out_idle_overrides_(small)
    with ended_by_exception(), TemporaryDirectory(prefix="megalith-verify-") as folder, _environment_of_ranks():
        progress("one process")
        proof = Proof.begin(config, small, Path(folder))
        results = list(_run(proof, list(cases(rows)), progress))
        wrong = next((result for result in results if not result.same), None)
        if wrong is not None:
            progress("searching for the smallest failing layout")
            wrong = narrowed(proof, wrong)
    uncovered += [*_uncovered(config, missing_pairs(shown, rows), results), *experts_not_shown(config, rows)]
    runs = [(row, load_run(on_layout(small, config, row, "float64"), world_size=num_ranks(row))) for row in rows]
    uncovered += stacks_not_shown(config, runs)
    uncovered += _only_on_other_paths(results) if wrong is None else ()
    return Verification(axes_of(config, layout), _in_words(small), results, wrong, uncovered)


def cases(rows: Sequence[Degrees]) -> Iterator[Case]:
    """The small runs for layouts ``rows``: all of them in float64 on paths that need no compiler, a few on the others.

    Tensor and context parallelism change the inputs of operations, and expert parallelism those of experts; the other
    axes only distribute whole layers and batches. On paths where every rank has to compile, one layout of two axes
    (tensor and context first) and one with shared experts are therefore enough.
    """
    for row in [{}, *rows]:
        yield Case(row, "float64", "reference")
    for row in rows or [{}]:
        yield Case(row, "float64", "blocked")
    axes = [axis for axis in AXES if any(axis in row for row in rows)]
    fewest = {axis: min(row[axis] for row in rows if axis in row) for axis in axes}
    few, first, sharing = _of(fewest, axes[:2]), _of(fewest, axes[:1]), _of(fewest, _sharing_experts(axes))
    yield Case({}, "float32", "own")  # first on one rank, which compiles what later runs find in the cache
    for each in [few] + [sharing] * (sharing != few):
        if each:
            yield Case(each, "float32", "own")
    yield Case(first, "float64", "own")
    if why_not_interpret() is None:
        yield Case(sharing or first, "float32", "triton")


def _of(degrees: Degrees, axes: Sequence[str]) -> Degrees:
    return {axis: degrees[axis] for axis in axes}


def _sharing_experts(axes: Sequence[str]) -> list[str]:
    """An expert axis of ``axes`` and one whose ranks it is folded over; empty without expert axes."""
    experts = [axis for axis in axes if axis in FOLDED]
    return [next(axis for axis in axes if axis not in ("pipeline", *FOLDED)), experts[0]] if experts else []


def _run(proof: Proof, planned: Sequence[Case], progress: Callable[[str], None]) -> Iterator[Result]:
    """Yields the result of each case, up to the first failure, because further ones may take as long to time out."""
    for number, case in enumerate(planned, 1):
        progress(f"run {number} of {len(planned)}: {name_of(case.degrees)}, {case.dtype}, {case.paths}")
        yield (result := proof.run(case))
        if result.failure is not None:
            return


def _leave_out_idle_overrides_(small: Tree) -> list[str]:
    """Removes ``optim.overrides`` that match no parameter of the small model; returns a line for each."""
    with torch.device("meta"):
        task = task_of(load_run(on_one_process(small), world_size=1))
        model = task.build_model(BuildOptions(ProcessGroupCollection.single()))
    named = [(name, parameter) for name, parameter, _ in declared_parameters(model)]
    given = small["optim"]["overrides"]
    idle = [one for one in given if not matches(ParamGroupOverride.model_validate(one), named)]
    small["optim"]["overrides"] = [one for one in given if one not in idle]
    return [f"optim.overrides, match={one['match']}: no parameter of the small model matches" for one in idle]


def _ranks_needed(config: RunConfig) -> int:
    """Returns the smallest number of ranks that has the layout of ``config``; shard=-1 takes what experts need."""
    parallel = config.parallel
    of_stage = parallel.tensor * parallel.context * parallel.replicate * max(parallel.shard, 1)
    if parallel.shard == -1:
        of_stage = lcm(of_stage, parallel.expert * (parallel.expert_tensor or parallel.tensor))
    return parallel.pipeline * of_stage


@contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """Inside the ``with`` block, the server that forks ranks starts with the environment variables that they need."""
    before = dict(os.environ)
    os.environ.update(_OF_RANKS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _uncovered(config: RunConfig, pairs: Sequence[tuple[str, str]], results: Sequence[Result]) -> Iterator[str]:
    for one, other in pairs:
        yield f"{one} with {other}: together they need more than {MOST_RANKS} ranks"
    taken = {path for result in results for path in result.taken} | {"reference"}
    for path in get_args(Backend):
        if path not in taken:
            yield f"path {path}: {_why_not(path)}"
    if config.precision.dtype not in ("float64", "float32"):
        yield f"precision.dtype={config.precision.dtype}: rounding would hide differences; float32 and float64 were run"
    if config.precision.fp8 is not None:
        given = f"precision.fp8.recipe={config.precision.fp8.recipe}"
        yield f"{given}: the small model has no blocks of 128 numbers; it was run without"
    if config.train.compile:
        yield "train.compile=true: each rank compiles its own layers; they were run in eager mode"
    if config.train.fused_linear_cross_entropy:
        yield "train.fused_linear_cross_entropy=true: a small micro-batch fits in one chunk of 2048 tokens"


def _only_on_other_paths(results: Sequence[Result]) -> Iterator[str]:
    """For each dtype and paths, the pairs of axes that were only run with another dtype or paths."""
    seen: dict[tuple[str, Paths], set[tuple[str, str]]] = {}
    for case in (result.case for result in results):
        seen.setdefault((case.dtype, case.paths), set()).update(combinations(sorted(case.degrees, key=AXES.index), 2))
    for (dtype, paths), pairs in seen.items():
        if left_out := sorted(set().union(*seen.values()) - pairs):
            words = ", ".join(f"{one} with {other}" for one, other in left_out)
            yield f"{dtype} on {_IN_WORDS[paths]}: {words}; covered in float64 on plain torch"


def _why_not(path: Backend) -> str:
    why = why_not_interpret() if path == "triton" else why_not_compile() if path == "compile" else None
    return why or "no run used it"


def _in_words(small: Tree) -> str:
    model, train = small["model"], small["train"]
    batch = train.get("global_batch_size") or train["batch_size_schedule"]
    return (
        f"{model['num_layers']} layers, hidden size {model['hidden_size']}, {model['num_attention_heads']} heads in "
        f"{model['num_query_groups']} groups, vocabulary size {model['vocab_size']}, {batch} samples of "
        f"{small['data']['seq_length']} tokens per step"
    )
