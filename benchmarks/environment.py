"""The same environment for every contender, and a description of it and of what was measured."""

import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

__all__ = ["SURROUNDED", "again_in_surroundings", "commit", "describe", "surroundings"]

SURROUNDED = "MEGALITH_BENCHMARK_SURROUNDED"  # set in the child of ``again_in_surroundings``

_PACKAGES = ("megalith", "torch", "transformers", "megatron-core", "numpy")


def surroundings(scratch: Path) -> dict[str, str]:
    """The environment variables of a measured process; it compiles into ``scratch``, so that no cache is warm.

    One pinned thread per available CPU: unpinned, two threads may share one. Freed memory is kept instead of returned:
    pages that the kernel must zero again cost a step up to a tenth of its time.
    """
    cpus = sorted(os.sched_getaffinity(0))
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(len(cpus)),
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in cpus),
        "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TMPDIR": str(scratch),  # where torch keeps the headers that it has compiled
        "HF_HUB_OFFLINE": "1",
    }


def again_in_surroundings(module: str) -> int:
    """Runs this command, ``python -m MODULE``, in a child process with ``surroundings``; returns its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = surroundings(Path(scratch)) | {SURROUNDED: "1"}
        return subprocess.run([sys.executable, "-m", module, *sys.argv[1:]], env=environment, check=False).returncode


def describe() -> dict[str, str]:
    """The machine, the package versions ("absent" for a package that is not installed), and the commit."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))  # if pinned, a thread sees one CPU
    return {"cpu": _cpu_model(), "threads": threads, "kernel": platform.release(), **versions, "commit": commit()}


def commit() -> str:
    """``MEGALITH_COMMIT`` if set, as git may be absent or older than the files; otherwise the checked-out commit."""
    if named := os.environ.get("MEGALITH_COMMIT"):
        return named
    folder = Path(__file__).parent
    asked = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    try:
        name, changed = (
            subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for command in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, with changes" if changed else name


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
