"""Signals and deaths: nothing is left running, the exit code and last line say why, and the run resumes bitwise."""

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from megalith.training.loop import Outcome
from tests.program import Program, processes_marked, runs, start, write_settings
from tests.rank_pool import ranks
from tests.resilience.pauses import Pause, lines
from tests.tiny_run import GPT2, settings
from tests.training.outcomes import final_tensors, losses, run_here, saved_step

KILL, SEGV, TERM, INT, HUP, USR1 = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
)
STEPS, EVERY = 6, 2
# place -> which call of it, and the step that is saved if the run is asked to stop there
CALLS = {"building": (1, 0), "reading data": (4, 3), "in a step": (4, 4), "evaluating": (2, 4), "saving": (2, 4)}
BESIDE = "saving beside training"
CALLS[BESIDE] = CALLS["saving"]
LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: {"tensor": 2}, 4: {"tensor": 2, "replicate": 2}}
STOPPED, PARENT, ALL, GROUP, SERVER = 75, -1, -2, -3, -4


@dataclass(frozen=True)
class Case:
    """``signals`` go to ``target``, a rank or one of these.

    ``PARENT``: the program that was started; ``ALL``: it and every rank; ``GROUP``: the program's process group, as
    from a terminal, a scheduler or ``timeout``; ``SERVER``: the process that ranks are forked from.
    """

    num_ranks: int
    place: str
    target: int
    signals: tuple[signal.Signals, ...]
    code: int
    says: str = ""

    def __str__(self) -> str:
        names = {PARENT: "the program", ALL: "all", GROUP: "its group", SERVER: "the server of the ranks"}
        target = names.get(self.target, f"rank {self.target}")
        return f"{self.num_ranks} ranks, {self.place}: {' '.join(one.name for one in self.signals)} to {target}"


def stops(num_ranks: int, place: str, target: int, number: signal.Signals) -> Case:
    return Case(num_ranks, place, target, (number,), STOPPED, f"{number.name}: saving at the next step boundary")


def quits(num_ranks: int, place: str, target: int, number: signal.Signals) -> Case:
    says = "quit" if target in (PARENT, GROUP) else ""
    return Case(num_ranks, place, target, (number, number), 128 + number, says)


def dies(num_ranks: int, place: str, number: signal.Signals = KILL) -> Case:
    return Case(num_ranks, place, PARENT, (number,), -number)


def loses(num_ranks: int, place: str, rank: int, number: signal.Signals = KILL) -> Case:
    return Case(num_ranks, place, rank, (number,), 1, rf"rank {rank} was killed by {number.name} \({number}\)")


# each place and each way to end once, with ranks where they matter: a signal passed on to them, and one of them lost.
# Other combinations are slow; test_resume.py kills a program and resumes, test_terminal.py closes the terminal of ranks
SAMPLE = [
    stops(1, "building", PARENT, TERM),
    stops(1, "reading data", PARENT, TERM),
    quits(1, "in a step", PARENT, INT),
    dies(1, "evaluating"),
    stops(2, "in a step", PARENT, INT),
    loses(2, "saving", 1),
    loses(2, BESIDE, 1),
]
REST = [
    dies(1, BESIDE),
    dies(2, BESIDE),
    loses(2, BESIDE, 0),
    quits(2, BESIDE, PARENT, INT),
    quits(1, BESIDE, PARENT, TERM),
    stops(1, "in a step", PARENT, INT),
    stops(1, "evaluating", PARENT, HUP),
    stops(1, "saving", PARENT, USR1),
    dies(1, "saving"),
    stops(2, "in a step", GROUP, HUP),
    stops(2, "reading data", 1, TERM),
    dies(2, "in a step"),
    quits(2, "evaluating", GROUP, TERM),
    *(stops(1, "in a step", PARENT, number) for number in (TERM, HUP, USR1)),
    stops(1, "evaluating", PARENT, TERM),
    quits(1, "evaluating", PARENT, TERM),
    quits(1, "saving", PARENT, HUP),
    dies(1, "in a step"),
    dies(1, "building"),
    stops(2, "evaluating", PARENT, HUP),
    stops(2, "saving", PARENT, USR1),
    stops(2, "building", PARENT, TERM),
    stops(2, "in a step", 0, USR1),
    stops(2, "in a step", ALL, TERM),
    *(stops(2, "in a step", GROUP, number) for number in (INT, TERM, USR1)),
    stops(2, "building", GROUP, TERM),
    quits(2, "evaluating", PARENT, TERM),
    quits(2, "in a step", PARENT, INT),
    Case(2, "reading data", SERVER, (KILL,), 1, "the process that the ranks were forked from has died"),
    Case(2, "saving", SERVER, (KILL,), 1, "the process that the ranks were forked from has died"),
    quits(2, "in a step", 1, TERM),
    quits(2, "building", PARENT, HUP),
    dies(2, "evaluating"),
    dies(2, "saving"),
    dies(2, "building"),
    dies(2, "reading data"),
    loses(2, "in a step", 1),
    loses(2, "in a step", 0),
    loses(2, "building", 1),
    loses(2, "evaluating", 1),
    loses(2, "reading data", 0),
    loses(2, "in a step", 1, SEGV),
    stops(4, "in a step", PARENT, TERM),
    stops(4, "saving", 2, USR1),
    loses(4, "in a step", 3),
    dies(4, "evaluating"),
    quits(4, "saving", PARENT, INT),
]


@functools.cache
def undisturbed(num_ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Tensors and losses of an uninterrupted run."""
    tree = tree_in(Path(mkdtemp(prefix="undisturbed-")), num_ranks)
    assert set(ranks(num_ranks, run_here, tree, num_ranks)) == {Outcome.DONE}
    return final_tensors(tree["run"]), losses(tree["run"])


def tree_in(folder: Path, num_ranks: int) -> dict[str, Any]:
    return settings(
        folder,
        model={**GPT2, "ffn_hidden_size": None, "num_query_groups": None},
        data={"valid": str(folder / "text")},
        train={"steps": STEPS, "evaluation": {"every": 2, "samples": 4}},
        checkpoint={"every": EVERY},
        parallel=LAYOUTS[num_ranks],
    )


def processes_of(program: Program) -> list[int]:
    """The running processes of a program: itself, and those with its mark in their environment."""
    return [*processes_marked(program.mark), *([program.pid] if program.code is None else [])]


def deliver(case: Case, program: Program, pids: list[int]) -> None:
    send, targets = os.kill, {PARENT: [program.pid], ALL: [program.pid, *pids]}.get(case.target)
    if case.target == GROUP:
        send, targets = os.killpg, [program.pid]
    elif case.target == SERVER:
        targets = [parent_of(pids[0])]
    for count, number in enumerate(case.signals):
        if count:
            time.sleep(1.2)  # within a second it would count as the same request
        for target in targets or [pids[case.target]]:
            send(target, number)


def parent_of(pid: int) -> int:
    return int(re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])


def where_it_goes_on(run: str) -> str:
    """The message after a run has lost work."""
    step = saved_step(run)
    return (
        f"run the same command to continue from step {step} ("
        if step
        else "no checkpoint was saved; run the same command to start"
    )


def wait_until_nothing_runs(program: Program, pids: list[int]) -> None:
    """Returns once the program, its ranks ``pids``, and everything else that it started have ended."""
    deadline = time.monotonic() + 10
    while left := [*processes_of(program), *filter(runs, pids)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def wait_until_told(program: Program, words: str) -> None:
    deadline = time.monotonic() + 10
    while words not in program.err():
        assert time.monotonic() < deadline, program.err()
        time.sleep(0.02)


@pytest.mark.parametrize("case", [*SAMPLE, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)], ids=str)
def test_nothing_is_left_running_and_the_run_goes_on_bitwise(case, tmp_path):
    tree = tree_in(tmp_path, case.num_ranks)
    tree["checkpoint"]["async_save"] = case.place == BESIDE
    call, stopped_at = CALLS[case.place]
    pause = Pause(tmp_path, range(case.num_ranks))
    command = ("train", write_settings(tree, tmp_path), "--nproc", case.num_ranks)
    program = start(*command, first=lines(case.place, call, tmp_path))
    pids = pause.pids()
    deliver(case, program, pids)
    if case.code == STOPPED:
        wait_until_told(program, "saving at the next step boundary")
        pause.end()
    found = program.ended(timeout=20)
    assert found.code == case.code, found
    assert re.search(case.says, found.err.splitlines()[-1] if found.err else ""), found
    if case.num_ranks > 1 and case.code > 0 and case.code != STOPPED:
        assert where_it_goes_on(tree["run"]) in found.err.splitlines()[-1]
    wait_until_nothing_runs(program, pids)
    if case.code == STOPPED:
        assert saved_step(tree["run"]) == stopped_at
    else:
        assert saved_step(tree["run"]) >= stopped_at - EVERY
    assert set(ranks(case.num_ranks, run_here, tree, case.num_ranks)) == {Outcome.DONE}
    tensors, curve = undisturbed(case.num_ranks)
    got = final_tensors(tree["run"])
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert losses(tree["run"]) == curve


@contextmanager
def read_in_the_background(terminal: int) -> Iterator[None]:
    os.set_blocking(terminal, False)
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.02):
            with suppress(BlockingIOError):
                os.read(terminal, 65536)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_terminal_that_is_closed_ends_a_run_with_its_state_saved(tmp_path):
    tree = tree_in(tmp_path, 1)
    ours, theirs = os.openpty()
    pause = Pause(tmp_path, [0])
    first = lines("in a step", 4, tmp_path)
    program = start("train", write_settings(tree, tmp_path), first=first, terminal=os.ttyname(theirs))
    with read_in_the_background(ours):  # otherwise the buffer fills up and the program waits
        pause.pids()
    os.close(theirs)
    os.close(ours)  # the kernel sends SIGHUP, and refuses further writes
    time.sleep(0.2)
    pause.end()
    assert program.ended().code == STOPPED
    assert saved_step(tree["run"]) == 4


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_before_there_are_ranks_ends_the_program_at_once(number, tmp_path):
    pause = Pause(tmp_path, [0])
    command = ("train", write_settings(tree_in(tmp_path, 2), tmp_path), "--nproc", 2)
    program = start(*command, first=lines("before there are ranks", 1, tmp_path))
    pause.pids()
    servers = [pid for pid in processes_marked(program.mark) if b"forkserver" in command_line(pid)]
    assert servers  # torch is imported for the ranks while the run is checked
    program.send_signal(number)
    found = program.ended(timeout=20)
    assert found.code == STOPPED
    assert found.err == f"{number.name}: stopped before the ranks were started; run the same command to start again\n"
    wait_until_nothing_runs(program, servers)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# tells that a rank is requested from the server, which from then on is not replaced if it dies
TELL_OF_FORKING = """
import sys
from multiprocessing.context import ForkServerProcess

fork = ForkServerProcess.start

def forking(self):
    print("forking", file=sys.stderr, flush=True)
    fork(self)

ForkServerProcess.start = forking
""".splitlines()


def test_a_server_that_is_killed_before_it_has_forked_a_rank_is_told_of_in_one_line(tmp_path):
    pause = Pause(tmp_path, [0])
    command = ("train", write_settings(tree_in(tmp_path, 2), tmp_path), "--nproc", 2)
    paused = lines("starting the server of the ranks", 1, tmp_path)
    program = start(*command, first=[*TELL_OF_FORKING, *paused])
    [server] = pause.pids()
    wait_until_told(program, "forking")
    os.kill(server, KILL)
    found = program.ended(timeout=20)
    assert found.code == 1
    started, _, why = found.err.splitlines()
    assert started == "starting 2 ranks"
    assert why.startswith(
        "the process that the ranks were forked from has died (out of memory?); "
        "no checkpoint was saved; run the same command to start"
    )
    wait_until_nothing_runs(program, [server])


def test_a_rank_that_stands_still_is_named(tmp_path):
    tree = tree_in(tmp_path, 2)
    hurried = [
        "from functools import partial",
        "from megalith.resilience import launch",
        "launch.launch = partial(launch.launch, stall_seconds=1.0)",
    ]
    pause = Pause(tmp_path, [1])
    command = ("train", write_settings(tree, tmp_path), "--nproc", 2)
    program = start(*command, first=[*hurried, *lines("in a step", 4, tmp_path, rank=1)])
    [rank_1] = pause.pids()
    wait_until_told(program, "waiting for rank 1 since step 3: rank 1 is at training/loop.py:")
    os.kill(rank_1, signal.SIGSTOP)
    wait_until_told(program, "waiting for rank 1 since step 3: rank 1 does not answer")
    program.send_signal(KILL)  # a stopped rank runs no Python, but still ends with its parent
    assert program.ended(timeout=20).code == -KILL
    wait_until_nothing_runs(program, [rank_1])
