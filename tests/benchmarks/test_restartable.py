"""Items in a child process: one that fails, ends its process or hangs loses only its own line."""

import os
import signal
import subprocess
import sys
import time

import torch

from benchmarks.fusions import contest, registry, report
from benchmarks.restartable import Item, Line, lines_of

FOREVER = float("inf")


def working(number: int, kind: str) -> Line:
    if kind == "fails":
        raise ValueError(f"{number} is wrong")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(1000)
    return {"number": number, "process": os.getpid()}


def lines(kinds: list[str], limit: float = 60.0, deadline: float = FOREVER) -> list[Line]:
    items = [Item(f"{number}", (number, kind)) for number, kind in enumerate(kinds)]
    return list(lines_of(working, items, limit, deadline))


def test_an_item_that_fails_or_ends_its_process_costs_its_own_line_and_another_process_goes_on():
    found = lines(["is", "is", "fails", "is", "dies", "is"])
    assert [line["item"] for line in found] == ["0", "1", "2", "3", "4", "5"]
    assert [line.get("number") for line in found] == [0, 1, None, 3, None, 5]
    assert found[2]["failure"] == "ValueError: 2 is wrong"
    assert found[4]["failure"] == "its process ended with code -9"
    processes = [line["process"] for line in found if "process" in line]
    assert processes[0] == processes[1]
    assert len(set(processes)) == 3
    assert os.getpid() not in processes


def test_an_item_that_hangs_is_ended_and_what_no_time_is_left_for_is_named():
    lines(["is"])  # starts the fork server, which takes longer
    found = lines(["is", "hangs", "is"], limit=3.0)
    assert [line.get("failure") for line in found] == [None, "not done within 3 s", None]
    found = lines(["is", "hangs", "is"], deadline=time.monotonic() + 2.0)
    assert [line["item"] for line in found] == ["0", "1", "2"]
    assert found[1]["failure"].startswith("not done within ")
    assert found[2]["failure"] == "not run: no time was left"


def test_one_item_can_be_run_by_a_command():
    command = [sys.executable, "-m", "benchmarks.restartable", "benchmarks.gpu_check.machine:versions", "[]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f'"torch": "{torch.__version__}"' in done.stdout


def test_a_contest_that_its_process_did_not_survive_has_the_reason_in_its_row():
    operation = registry.OPERATIONS["rms norm"]
    row = contest.failed(operation, 1 << 20, torch.bfloat16, "its process ended with code -11")
    table = report.as_markdown([report.Run([row], [float("nan")])], {"device": "CPU"}, "today")
    assert "| rms norm | bfloat16 | 1 | its process ended with code -11 |" in table
