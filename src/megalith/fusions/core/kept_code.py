"""Keeps the code of compiled formulas for later runs, in the folder of torch's compile cache.

Its place depends on the sources, torch, Python, the capability of the CPU and the compiler's settings, so that nothing
stale is loaded. Where the folder cannot be written, each process compiles anew.
"""

import hashlib
import itertools
import logging
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

import megalith
from megalith.torch_compat.compiled_ahead import CompiledAhead, cache_folder, load_ahead, settings_of_the_compiler

__all__ = ["KeptCode"]

R = TypeVar("R")

log = logging.getLogger(__name__)


class KeptCode:
    """Files with the code for ``form``, a text that says what was compiled; each holds a variant, for other strides."""

    def __init__(self, form: str) -> None:
        self._name = hashlib.sha256(f"{form} {settings_of_the_compiler()}".encode()).hexdigest()

    def load(self, function: Callable[..., R]) -> list[CompiledAhead[R]]:
        """All variants; a file that cannot be loaded is removed."""
        variants = []
        try:
            for path in self._paths():
                try:
                    variants.append(load_ahead(path, function))
                except FileNotFoundError:
                    break
                except Exception as error:  # incomplete, or the compiler is needed again and has been removed
                    log.debug("%s cannot be loaded: %s", path, error)
                    path.unlink()
                    break
        except OSError as error:
            log.debug("%s", error)
        return variants

    def keep(self, variant: CompiledAhead[R]) -> None:
        """Writes another file, unless the sources have changed since they were imported."""
        if _fingerprint(_PACKAGE) != _SOURCES:
            return None
        try:
            for path in self._paths():
                if not path.exists():
                    return variant.save(path)
        except Exception as error:  # a folder that cannot be written, or code that torch cannot serialize
            log.debug("the code of a formula is not kept: %s", error)

    def _paths(self) -> Iterator[Path]:
        if (folder := _folder()) is not None:
            yield from (folder / f"{self._name}-{index}" for index in itertools.count())


def _fingerprint(package: Path) -> str | None:
    """Identifies the sources of formulas, this torch and this CPU's capability; None if sources cannot be read."""
    parts = ("fusions", "numerics", "torch_compat")
    given = hashlib.sha256()
    try:
        # names that start with a dot are those of editors
        paths = [path for part in parts for path in sorted((package / part).glob("**/[!.]*.py"))]
        for path in paths:
            given.update(path.read_bytes())
    except OSError:
        return None
    machine = platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()
    given.update(repr((megalith.__version__, torch.__version__, *machine)).encode())
    return given.hexdigest()[:32] if paths else None


_PACKAGE = Path(megalith.__file__).parent
_SOURCES = _fingerprint(_PACKAGE)  # at import, because files may be edited while this process runs what they said


def _folder() -> Path | None:
    return None if _SOURCES is None else cache_folder() / "megalith" / _SOURCES
