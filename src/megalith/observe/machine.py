"""What a run ran on: versions and the machine, for the record."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["describe_machine"]


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
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return {name: fact for name, fact in facts.items() if fact}


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
