"""Starts several ranks of this program on this machine: what ``--nproc`` stands for.

It is torchrun's own agent, called rather than started, because torchrun turns every failure into exit code 1 and prints
it at length. Ranks leave their exit codes in a folder that the environment names; a signal to this process reaches
every rank, and is waited for.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["EXIT_CODES", "launch", "leave_exit_code"]

EXIT_CODES = "MEGALITH_EXIT_CODES"


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs ``python -m megalith`` with ``arguments`` on ``num_ranks`` ranks; returns the exit code of the run.

    That is the one that rank 0 left, or else another rank; if none did, that of the first process to fail, and 1 if a
    signal killed it. A rank leaves none when it dies, or when an error that was not foreseen ends it, because that may
    only be the connection to another rank that broke.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        codes = Path(folder, "exit_codes")
        codes.mkdir()
        os.environ[EXIT_CODES] = str(codes)  # what the agent hands down is its own environment
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
        )
        failed = 1
        try:
            elastic_launch(config, sys.executable)("-m", "megalith", *arguments)
        except ChildFailedError as error:
            failed = max(failed, error.get_first_failure()[1].exitcode)  # below 0: the signal that killed it
        except SignalException:
            failed = int(len(list(codes.iterdir())) < num_ranks)
        else:
            return 0
        finally:
            del os.environ[EXIT_CODES]
        left = sorted(tuple(map(int, path.name.split("-"))) for path in codes.iterdir())
        return next((code for _, code in left if code), failed)


def leave_exit_code(code: int) -> None:
    """Tells ``launch`` how this rank ends, if it was launched so."""
    if folder := os.environ.get(EXIT_CODES):
        # all of it in the name: a process that is killed here leaves it whole or not at all
        Path(folder, f"{os.environ['RANK']}-{code}").touch()
