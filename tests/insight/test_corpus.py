"""The standard-library corpus, and the split by file."""

import os
import sysconfig
from pathlib import Path

import pytest

from megalith.errors import ConfigError, DataError
from megalith.insight import corpus
from megalith.insight.corpus import documented_functions, labelled_passages, split_by_file, standard_library_sources

FILES = [Path(f"/usr/lib/python3/{folder}/{number}.py") for folder in ("a", "b") for number in range(100)]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of any size, in the directory layout of Debian, pyenv and conda."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    monkeypatch.setattr(corpus, "_SMALLEST", 100)
    for path in (
        "os.py", "json/decoder.py", "json/tests/test_decode.py", "test/regrtest.py", "idlelib/idle_test/htest.py",
        "unittest/test/support.py", "unittest/case.py", "site-packages/numpy/core.py", "dist-packages/apt.py",
        "__pycache__/os.py", "config-3.11-x86_64-linux-gnu/python-config.py", "lib-dynload/math.so", "LICENSE.txt",
        "testing.py",
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 'é'\n" * 4, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    return tmp_path


def test_sources_are_utf8_and_neither_tests_nor_what_others_installed(library):
    found = [path.relative_to(library).as_posix() for path in standard_library_sources()]
    assert found == ["json/decoder.py", "os.py", "testing.py", "unittest/case.py"]


def test_this_machine_has_megabytes_of_them():
    found = standard_library_sources()
    assert sum(path.stat().st_size for path in found) > 8e6
    assert Path(os.__file__).resolve() in {path.resolve() for path in found}
    assert not [path for path in found if "site-packages" in path.parts]
    assert found == standard_library_sources()


def test_a_library_without_sources_names_the_way_out(library, monkeypatch):
    monkeypatch.setattr(corpus, "_SMALLEST", 2_000_000)
    with pytest.raises(DataError, match=r"at least 2 MB .* found 0\.0 MB in 4 files; use a full Python .*data prepare"):
        standard_library_sources()


def test_the_split_parts_the_files_and_keeps_their_order():
    train, held_out = split_by_file(FILES, 0.05, seed=1)
    assert len(held_out) == 10
    assert train == [path for path in FILES if path not in held_out]
    assert held_out == [path for path in FILES if path not in train]


def test_the_split_depends_on_the_seed_and_on_names_below_the_shared_folder_only():
    elsewhere = [Path("/opt/conda") / path.relative_to("/usr/lib/python3") for path in reversed(FILES)]
    here, there = (split_by_file(files, 0.05, seed=7)[1] for files in (FILES, elsewhere))
    assert {path.parts[-2:] for path in here} == {path.parts[-2:] for path in there}
    assert {tuple(split_by_file(FILES, 0.05, seed)[1]) for seed in (7, 7, -8)} == {
        tuple(here),
        tuple(split_by_file(FILES, 0.05, -8)[1]),
    }
    assert split_by_file(FILES, 0.05, -8)[1] != here


def test_neither_side_is_ever_empty():
    for fraction in (0.001, 0.999):
        train, held_out = split_by_file(FILES[:3], fraction, seed=0)
        assert train
        assert held_out


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match=r"between 0 and 1; got 5"):
        split_by_file(FILES, 5, seed=0)
    with pytest.raises(DataError, match=r"at least 2 files .* got 1"):
        split_by_file(FILES[:1], 0.05, seed=0)


def test_passages_are_whole_and_those_of_the_largest_packages(tmp_path):
    lines = {"big/a.py": 7, "big/deep/b.py": 4, "medium/c.py": 4, "small/d.py": 2, "alone.py": 9}
    files = []
    for name, number in lines.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(f"{name} {line}" for line in range(number)))  # empty lines do not count
        files.append(path)
    found = labelled_passages(files, num_packages=2, num_lines=2)
    assert [label for _, label in found] == ["big"] * 5 + ["medium"] * 2
    assert found[0][0] == "big/a.py 0\nbig/a.py 1"
    assert found[3][0] == "big/deep/b.py 0\nbig/deep/b.py 1"


CODE = '''
class Ship:
    @property
    def name(self) -> str:
        """The name of
        a ship.

        More of it."""
        # read once
        return self.known or "none"

    def sail(self):
        """A single statement is the docstring itself."""

async def find(ships, name="x"):
    "Finds a ship."
    def inner():
        "Inside."
        return 1
    return [ship for ship in ships if ship.name == name]

def silent():
    return 1
'''


def test_documented_functions_are_pairs_of_summary_and_code(tmp_path):
    for name, text in (("a", CODE), ("b", "def broken(:"), ("c", CODE)):
        (tmp_path / f"{name}.py").write_text(text)
    found = documented_functions([tmp_path / f"{name}.py" for name in "abc"])
    assert found == [
        (
            "Finds a ship.",
            'async def find(ships, name=\'x\'):\n\n    def inner():\n        """Inside."""\n        return 1\n'
            "    return [ship for ship in ships if ship.name == name]",
        ),
        ("The name of a ship.", "def name(self) -> str:\n    return self.known or 'none'"),
        ("Inside.", "def inner():\n    return 1"),
    ]
