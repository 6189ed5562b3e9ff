"""Starts several ranks of this program on this machine: what ``--nproc`` stands for.

It is torchrun's own agent, called rather than started, because torchrun turns every failure into exit code 1 and prints
it at length. Rank 0 leaves its exit code in a file that the environment names; a signal to this process reaches every
rank, and is waited for.
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

__all__ = ["EXIT_CODE_FILE", "launch", "leave_exit_code"]

EXIT_CODE_FILE = "MEGALITH_EXIT_CODE_FILE"


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs ``python -m megalith`` with ``arguments`` on ``num_ranks`` ranks; returns the exit code of rank 0."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        exit_code_file = Path(folder, "exit_code")
        environment = {EXIT_CODE_FILE: str(exit_code_file)}
        os.environ.update(environment)  # what the agent hands down is its own environment
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
            failed = error.get_first_failure()[1].exitcode
        except SignalException:
            pass
        else:
            return 0
        finally:
            del os.environ[EXIT_CODE_FILE]
        return int(exit_code_file.read_text()) if exit_code_file.exists() else failed


def leave_exit_code(code: int) -> None:
    """Tells ``launch`` how this program ends, if it was launched so and is rank 0."""
    if (path := os.environ.get(EXIT_CODE_FILE)) and os.environ.get("RANK") == "0":
        Path(path).write_text(str(code))
