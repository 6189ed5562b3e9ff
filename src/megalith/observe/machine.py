"""Describes the machine and the software versions of a run."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["describe_machine", "free_memory_bytes", "memory_bytes", "num_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def describe_machine() -> dict[str, str]:
    """Package versions, operating system, processor, cores and memory, as far as they are known."""
    facts = {"python": platform.python_version()}
    for package in ("megalith", "torch", "numpy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["system"] = platform.platform(terse=True)
    facts["processor"] = _processor()
    facts["cores"] = str(num_cores())
    if (memory := memory_bytes()) is not None:
        facts["memory"] = f"{memory / 2**30:.0f} GiB"
    return {name: fact for name, fact in facts.items() if fact}


def memory_bytes() -> int | None:
    """Total bytes of memory available to this machine, container or job; None if unknown."""
    if not (hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([memory, *(group.limit for group in _memory_of_groups())])


def free_memory_bytes() -> int | None:
    """Bytes of memory that a process can still allocate, counting reclaimable file caches; None if unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return memory_bytes()
    available = [line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    left = [max(0, group.limit - group.used) for group in _memory_of_groups()]
    return min([int(kilobytes) * 1024 for kilobytes in available] + left, default=None)


def num_cores() -> int:
    """The cores that this process may use: containers and batch systems may restrict it to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _GroupMemory:
    """The memory of a control group in bytes: its limit, and what is in use without reclaimable file caches."""

    limit: int
    used: int


def _memory_of_groups() -> Iterator[_GroupMemory]:
    """Yields this process's control groups and their parents that have a limit (cgroups v2 and v1)."""
    lines = _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.exists() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limited, used, cached = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limited, used = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        own = top / path.strip("/")
        # a container may see its group's path on the host, of which only the parents exist inside
        for folder in (own, *(above for above in own.parents if above.is_relative_to(top))):
            if (limit := _number(_text(folder / limited))) is not None:
                stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if line)
                in_use = (_number(_text(folder / used)) or 0) - (_number(stat.get(cached, "")) or 0)
                yield _GroupMemory(limit, max(0, in_use))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
