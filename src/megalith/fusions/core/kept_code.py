"""Keeps the code of compiled formulas for later runs, in the folder of torch's compile cache.

Its place depends on the sources, torch, Python, the capability of the CPU and the compiler's settings, so that nothing
stale is loaded. Where the folder cannot be written, each process compiles anew.
"""

import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import megalith
from megalith.torch_compat.compiled_ahead import CompiledAhead, cache_folder, load_ahead, settings_of_the_compiler

__all__ = ["KeptCode"]

R = TypeVar("R")

log = logging.getLogger(__name__)


class KeptCode:
    """Files with the code for ``form``, a text that says what was compiled. Each holds a variant, for other strides."""

    def __init__(self, form: str) -> None:
        self._name = hashlib.sha256(f"{form} {settings_of_the_compiler()}".encode()).hexdigest()
        self._free: Path | None = None

    def find(self, function: Callable[..., R], arguments: tuple[object, ...]) -> CompiledAhead[R] | None:
        """The first variant that fits ``arguments``."""
        folder = _folder()
        if folder is None:
            return None
        index = 0
        while (path := folder / f"{self._name}-{index}").exists():
            try:
                code = load_ahead(path, function)
                if code.fits(*arguments):
                    return code
            except Exception as error:  # an incomplete file, or a compiler that is gone
                log.debug("compiling again what %s holds: %s", path, error)
                break
            index += 1
        self._free = path
        return None

    def keep(self, code: CompiledAhead[R]) -> None:
        """Writes a variant that ``find`` has not found, unless the sources have changed since they were imported."""
        if self._free is None or _fingerprint(_PACKAGE) != _SOURCES:
            return
        try:
            code.save(self._free)
        except Exception as error:  # a folder that cannot be written
            log.debug("%s is not written: %s", self._free, error)


def _fingerprint(package: Path) -> str | None:
    """Identifies the sources of formulas, this torch and this CPU's capability; None if there are no sources."""
    parts = ("fusions", "numerics", "torch_compat")
    paths = [path for part in parts for path in sorted((package / part).glob("**/*.py"))]
    if not paths:
        return None
    given = hashlib.sha256()
    for path in paths:
        given.update(path.read_bytes())
    machine = platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()
    given.update(repr((megalith.__version__, torch.__version__, *machine)).encode())
    return given.hexdigest()[:32]


_PACKAGE = Path(megalith.__file__).parent
_SOURCES = _fingerprint(_PACKAGE)  # at import, because files may be edited while this process runs what they said


def _folder() -> Path | None:
    return None if _SOURCES is None else cache_folder() / "megalith" / _SOURCES
