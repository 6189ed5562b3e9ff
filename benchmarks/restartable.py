"""Runs items of work in a child process that is restarted after an item that breaks it; one result line per item.

A kernel that fails on a GPU corrupts everything its process does later, and one that hangs never returns. So no item
runs in the process that writes the results, and a process is discarded as soon as anything in it has failed.

    python -m benchmarks.restartable MODULE:FUNCTION ARGUMENTS    one item, for tools such as compute-sanitizer
"""

import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

__all__ = ["Item", "Job", "Line", "lines_of"]

Line = dict[str, Any]
Job = Callable[..., Line]
_IMPORTED = [
    "torch",
    "torch._dynamo",  # takes eight seconds, which the first item of every process would otherwise pay
    "benchmarks.fusions.registry",
    "tests.fusions.harness",
]  # imported once, before processes are forked
_TO_START = 120.0  # seconds that a process may take to start; not counted towards an item's limit
_TO_END = 10.0  # seconds that a process may take to exit after its last item


class Item(NamedTuple):
    """A name to display, and the arguments of the job, which must be valid JSON."""

    name: str
    arguments: tuple[Any, ...]


def lines_of(job: Job, items: Iterable[Item], limit: float, deadline: float) -> Iterator[Line]:
    """Yields the result of ``job`` for each item, plus the name as ``item``; if it fails, the reason as ``failure``.

    Args:
        job: a module-level function of an item's arguments.
        limit: seconds for one item.
        deadline: in ``time.monotonic()``; the item running then is killed, and later ones do not run.
    """
    left = list(items)
    while left and time.monotonic() < deadline:
        num_done = 0
        for line in _one_process(job, left, limit, deadline):
            yield {"item": left[num_done].name, **line}
            num_done += 1
        left = left[num_done:]
    for item in left:
        yield {"item": item.name, "failure": "not run: no time was left"}


def _one_process(job: Job, items: list[Item], limit: float, deadline: float) -> Iterator[Line]:
    """Yields lines of ``items``, up to the first that fails; at least one."""
    context = multiprocessing.get_context("forkserver")  # never fork a process that has used a GPU
    context.set_forkserver_preload(_IMPORTED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, job, [item.arguments for item in items]))
    process.start()
    sender.close()
    try:
        _next_line(receiver, process, min(_TO_START, deadline - time.monotonic()))
        for _ in items:
            line = _next_line(receiver, process, min(limit, deadline - time.monotonic()))
            broken = line.pop("broken", True)
            yield line
            if broken:
                return
        process.join(_TO_END)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _next_line(receiver: Connection, process: Any, seconds: float) -> Line:
    try:
        if receiver.poll(max(0.0, seconds)):
            line: Line = receiver.recv()
            return line
    except EOFError:
        process.join()
        return {"failure": f"its process ended with code {process.exitcode}"}
    return {"failure": f"not done within {seconds:.0f} s"}


def _work(sender: Connection, job: Job, items: list[tuple[Any, ...]]) -> None:
    sender.send({})
    for arguments in items:
        line = _line(job, arguments)
        sender.send(line)
        if line["broken"]:
            return


def _line(job: Job, arguments: tuple[Any, ...]) -> Line:
    """The job's result; ``broken`` if it or the device failed, which the job itself may not have noticed."""
    try:
        line = job(*arguments)
    except Exception as error:
        return {"broken": True, "failure": f"{type(error).__name__}: {error}"[:600]}
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return {**line, "broken": True, "device": str(error).splitlines()[0]}
    return {**line, "broken": False}


def main() -> None:
    """Runs one item in this process and prints its line."""
    module, _, function = sys.argv[1].partition(":")
    line = _line(getattr(importlib.import_module(module), function), json.loads(sys.argv[2]))
    print(json.dumps(line))
    sys.exit(line["broken"])


if __name__ == "__main__":
    main()
