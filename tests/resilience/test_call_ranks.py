"""Calling a function on several ranks returns its results or raises one error, and leaves no process."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megalith.errors import DataError, RankFailedError
from megalith.resilience.call_ranks import call_ranks
from megalith.resilience.rank_link import tell
from megalith.training.process_group import process_group
from tests.program import runs

# without OMP_NUM_THREADS, which the tests set
SHARING = """
from megalith.resilience.call_ranks import call_ranks
from megalith.resilience.launch import get_ready
from tests.resilience.test_call_ranks import num_threads

if __name__ == "__main__":
    get_ready(2)
    print(*call_ranks(2, num_threads))
"""


def num_threads() -> int:
    return torch.get_num_threads()


def test_ranks_share_the_cores():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = [sys.executable, "-c", SHARING]
    out = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(max(1, (os.cpu_count() or 1) // 2))] * 2


def rank_and_sum(of: torch.Tensor) -> tuple[int, float]:
    with process_group(torch.device("cpu")):
        total = of * (dist.get_rank() + 1)
        dist.all_reduce(total)
        return dist.get_rank(), float(total)


def write_pid(folder: str) -> None:
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(str(os.getpid()))


def fail_on_rank_1(folder: str, how: str) -> None:
    write_pid(folder)
    tell(step=3)
    if os.environ["RANK"] == "1":
        match how:
            case "raise":
                raise KeyError("nobody foresaw it")
            case "refuse":
                raise DataError("the data are gone")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                sys.stderr.write("about to crash\n")
                os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(100)


def fail_while_the_others_wait(how: str) -> None:
    """Rank 1 fails outside of a collective, and frees memory while its peer already knows; ``how`` the peer waits."""
    with process_group(torch.device("cpu")):
        if dist.get_rank() == 1:
            raise KeyError("nobody foresaw it")
        if how == "a collective":
            dist.all_reduce(torch.ones(3))
        else:
            dist.irecv(torch.ones(3), src=1).wait()


@pytest.mark.parametrize("how", ["a collective", "a message"])
def test_the_error_that_is_reported_is_the_first_not_that_of_a_peer_whose_connection_broke(how):
    with pytest.raises(RankFailedError, match=r"rank 1 failed:\n(.*\n)*KeyError: 'nobody foresaw it'"):
        call_ranks(2, fail_while_the_others_wait, how)


def pids(folder) -> list[int]:
    return [int(path.read_text()) for path in folder.iterdir()]


def test_results_come_in_the_order_of_ranks_and_the_caller_has_no_process_group():
    assert call_ranks(3, rank_and_sum, torch.tensor(2.0)) == [(0, 12.0), (1, 12.0), (2, 12.0)]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", r"rank 1 failed:\nTraceback(.|\n)*KeyError: 'nobody foresaw it'"),
        ("refuse", r"error: rank 1: the data are gone"),
        ("die", r"rank 1 was killed by SIGKILL \(9\)"),
        ("crash", r"killed by SIGSEGV \(11\)\nlast output of rank 1:\nabout to crash\n(.|\n)*in fail_on_rank_1"),
        ("hang", r"no step in 1 s since step 3: .*rank 1 is at resilience/call_ranks.py"),
    ],
)
def test_a_rank_that_does_not_come_to_its_end_is_one_error_and_no_process_is_left(how, says, tmp_path):
    with pytest.raises(RankFailedError, match=says):
        call_ranks(2, fail_on_rank_1, str(tmp_path), how, stall_seconds=1.0 if how == "hang" else 60.0)
    assert not any(map(runs, pids(tmp_path)))


class DiesWhenItIsRead:
    def __reduce__(self):
        return os.abort, ()


def test_a_rank_that_dies_while_it_starts_is_one_error_too():
    with pytest.raises(RankFailedError, match="rank 0 was killed by SIGABRT"):
        call_ranks(1, str, DiesWhenItIsRead())


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_server_that_starts_after_its_program_has_ended_ends_at_once(is_alive):
    program = os.getpid() if is_alive else os.getppid()  # of the process that imports it, which the other is not
    code = "import os, sys, megalith.resilience.rank_server; print('MEGALITH_PROGRAM' in os.environ)"
    environment = {**os.environ, "MEGALITH_PROGRAM": str(program)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == ((0, "False\n") if is_alive else (1, ""))
