"""Reads and checks torchrun's environment variables; another launcher may set only some of them.

Does not need torch, so that a wrong number of ranks is reported immediately.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megalith.errors import ConfigError
from megalith.observe.machine import memory_bytes
from megalith.observe.units import quantity
from megalith.wording import counted

__all__ = ["LaunchedRank", "check_rendezvous", "launched_rank", "num_ranks"]

_WAY_OUT = "start ranks with torchrun or --nproc, or unset RANK to train in this process alone"
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
_LARGEST = 2**31 - 1
_RANK_BYTES = 100 << 20  # lower bound of a rank's memory once torch is loaded; measured: 150 MiB and more


@dataclass(frozen=True)
class LaunchedRank:
    """This process as a rank started by a launcher; ``local_world_size`` ranks run on this machine."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def local_ranks(self) -> range:
        """The ranks on this machine, which launchers number consecutively."""
        first = self.rank - self.rank % self.local_world_size
        return range(first, min(first + self.local_world_size, self.world_size))


def launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Returns this process's rank; None without a launcher, that is, if RANK is not set.

    Raises:
        ConfigError: variables are missing, not numbers, or contradict each other; the message lists all problems.
    """
    if "RANK" not in environment:
        return None
    found: dict[str, int] = {}
    wrong = [] if "WORLD_SIZE" in environment else ["WORLD_SIZE is not set, but RANK is"]
    for name in _LEAST.keys() & environment.keys():
        text = environment[name]
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else -1
        if _LEAST[name] <= number <= _LARGEST:
            found[name] = number
        else:
            wrong.append(f"{name} must be an integer from {_LEAST[name]} to {_LARGEST}; got {text[:40]!r}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in found and size in found and found[rank] >= found[size]:
            wrong.append(f"{rank} ({found[rank]}) must be below {size} ({found[size]})")
    if wrong:
        raise ConfigError(
            f"the environment variables of the launcher are invalid: {'; '.join(sorted(wrong))}; {_WAY_OUT}"
        )
    return LaunchedRank(found["RANK"], found["WORLD_SIZE"], found.get("LOCAL_WORLD_SIZE", 1))


def num_ranks(nproc: int, launched: LaunchedRank | None) -> int:
    """Returns the number of ranks of a run.

    Raises:
        ConfigError: ``nproc`` is below 1, is given although a launcher has started the ranks, or needs more memory than
            this machine has.
    """
    if launched is not None:
        if nproc != 1:
            raise ConfigError(
                f"--nproc ({nproc}) has no effect here: a launcher has started "
                f"{counted(launched.world_size, 'rank')} (RANK and WORLD_SIZE are set); leave --nproc out, or unset "
                "RANK"
            )
        return launched.world_size
    if nproc < 1:
        raise ConfigError(f"--nproc must be at least 1 (the number of ranks to start on this machine); got {nproc}")
    memory = memory_bytes()
    if memory is not None and nproc * _RANK_BYTES > memory:
        raise ConfigError(
            f"--nproc ({nproc}) is more than fits on this machine: the ranks take {quantity(nproc * _RANK_BYTES)}B "
            f"even without a model, and the machine has {quantity(memory)}B; use at most {memory // _RANK_BYTES}"
        )
    return nproc


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if MASTER_ADDR or MASTER_PORT, where the ranks meet, is missing or invalid."""
    port = environment.get("MASTER_PORT", "")
    wrong = [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR is not set"]
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        wrong.append(f"MASTER_PORT must be a port; got {port[:40]!r}" if port else "MASTER_PORT is not set")
    if wrong:
        raise ConfigError(f"RANK is set, but the ranks cannot connect: {'; '.join(wrong)}; {_WAY_OUT}")
