"""What a run ran on: versions and the machine, for the record."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["describe_machine", "memory_bytes"]

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the container that this process is in


def describe_machine() -> dict[str, str]:
    """Versions of what computes, the system, the processor, the cores and the memory; those of it that are known."""
    facts = {"python": platform.python_version()}
    for package in ("megalith", "torch", "numpy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["system"] = platform.platform(terse=True)
    facts["processor"] = _processor()
    facts["cores"] = str(_cores())
    if (memory := memory_bytes()) is not None:
        facts["memory"] = f"{memory / 2**30:.0f} GiB"
    return {name: fact for name, fact in facts.items() if fact}


def memory_bytes() -> int | None:
    """Bytes of memory that processes of this machine, or of this container, have together; None if nothing says."""
    if not (hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _LIMIT.read_text().strip() if _LIMIT.exists() else ""
    return min(memory, int(limit)) if limit.isdigit() else memory


def _cores() -> int:
    # a container or a batch system may leave a process fewer cores than the machine has
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # where platform.processor() is empty, as on most Linux systems
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
