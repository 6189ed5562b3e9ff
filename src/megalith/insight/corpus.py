"""Real text that every machine has: the source code of the running Python's standard library."""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from megalith.errors import ConfigError, DataError

__all__ = ["documented_functions", "labelled_passages", "split_by_file", "standard_library_sources"]

_SMALLEST = 2_000_000  # bytes; full libraries have about 12 MB, Debian's python3-minimal under 1 MB
# tests, installed packages, and build artifacts
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library_sources() -> list[Path]:
    """The UTF-8 ``.py`` files of the standard library, without its tests, sorted by path.

    Raises DataError if they have less than 2 MB, as in a minimal Python installation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    size = 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT and not name.startswith("config-")]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            text = path.read_bytes()
            if _is_utf8(text):
                sources.append(path)
                size += len(text)
    if size < _SMALLEST:
        raise DataError(
            f"the standard library in {root} must contain at least {_SMALLEST // 10**6} MB of source text; "
            f"found {size / 1e6:.1f} MB in {len(sources)} files; use a full Python (on Debian and Ubuntu: apt-get "
            "install python3-full), or train on your own text: megalith data prepare FILES... --out PREFIX"
        )
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix())


def split_by_file(files: Sequence[Path], fraction: float, seed: int) -> tuple[list[Path], list[Path]]:
    """Splits ``files`` into (train, held out), each in input order; ``fraction`` of the files is held out.

    The choice depends on a keyed hash of the path relative to the common folder, so it does not depend on the location
    of that folder. Files are not split, because the halves of one file are too similar.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the fraction of files to hold out must be between 0 and 1; got {fraction}; use 0.05")
    if len(files) < 2:
        raise DataError(
            f"at least 2 files are needed to hold one out; got {len(files)}; split the text into more files"
        )
    root = os.path.commonpath([path.parent for path in files])
    key = seed.to_bytes(16, "little", signed=True)

    def rank(path: Path) -> bytes:
        return hashlib.blake2b(path.relative_to(root).as_posix().encode(), digest_size=16, key=key).digest()

    count = min(max(1, round(fraction * len(files))), len(files) - 1)
    held_out = set(sorted(files, key=rank)[:count])
    return [path for path in files if path not in held_out], [path for path in files if path in held_out]


def labelled_passages(files: Sequence[Path], num_packages: int, num_lines: int) -> list[tuple[str, str]]:
    """(passage, package) for the packages with the most passages of ``num_lines`` non-empty lines, sorted by package.

    The package is the top-level folder below the common folder of ``files``; files outside of a package are skipped.
    This is a realistic classification task: only the text of a passage indicates its package.
    """
    root = os.path.commonpath([path.parent for path in files])
    passages: dict[str, list[str]] = {}
    for path in files:
        below = path.relative_to(root).parts
        if len(below) > 1:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            whole = range(0, len(lines) - num_lines + 1, num_lines)
            passages.setdefault(below[0], []).extend("\n".join(lines[first : first + num_lines]) for first in whole)
    largest = sorted(passages, key=lambda name: (-len(passages[name]), name))[:num_packages]
    return [(passage, name) for name in sorted(largest) for passage in passages[name]]


def documented_functions(files: Sequence[Path]) -> list[tuple[str, str]]:
    """(summary, code) for the functions with a docstring, in the order of ``files``, each once.

    The summary is the first paragraph of the docstring, in one line; the code is without docstring, comments and
    decorators. Functions of a single statement, and files that this Python cannot parse, are left out. Finding the code
    of a summary is a realistic retrieval task (Husain et al. 2019, "CodeSearchNet", arXiv:1909.09436).
    """
    found: dict[tuple[str, str], None] = {}
    for path in files:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if summary:
                    node.body, node.decorator_list = node.body[1:], []
                    found[summary, ast.unparse(node)] = None
    return list(found)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
