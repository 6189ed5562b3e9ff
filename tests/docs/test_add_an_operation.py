"""docs/add_an_operation.md: the page's files, added to a copy of the repository, make a working fused operation."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, python_blocks

COPIED = ("src/megalith", "tests/fusions", "benchmarks")
PROGRAM = """
import torch
from benchmarks.fusions.registry import OPERATIONS
from megalith import fusions
from megalith.fusions import fused_softcap
from tests.fusions.harness import all_cases

[case] = [case for case in all_cases() if case.name == "softcap"]
for path in ("triton", "blocked", "reference"):
    for dtype in case.dtypes:
        case.assert_accurate(case.make(3, 127, dtype, "cpu"), path)
        case.assert_accurate(case.make(0, 127, dtype, "cpu"), path)
inputs = case.make(3, 8, torch.float64, "cpu")
assert torch.autograd.gradcheck(lambda x: case.compute(x=x, backend="reference"), inputs["x"])
traced = torch.compile(fused_softcap.softcap, fullgraph=True, backend="aot_eager")
assert torch.equal(traced(inputs["x"], 2.0), fused_softcap.softcap(inputs["x"], 2.0))
operation = OPERATIONS["softcap"]
given = operation.make(2**16, torch.float32, "cpu")
torch.testing.assert_close(operation.ours(**given), operation.eager(**given))
print(next(row for row in fusions.explain("cpu").splitlines() if row.startswith("softcap ")))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in (ROOT / "tests").glob("*.py"):
        shutil.copy(file, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for block in python_blocks("add_an_operation.md"):
        name = re.match(r"# (\S+)\n", block)[1]
        target = folder / name
        assert not target.exists(), name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.partition("\n")[2], "utf-8")
    return folder


def run(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{folder}:{folder / 'src'}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_files_on_the_page_are_an_operation_like_every_other(copy):
    done = run(copy, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert re.match(r"softcap +(compile|blocked) +default for cpu", done.stdout)


def test_the_files_on_the_page_keep_the_rules_of_the_house(copy):
    names = [re.match(r"# (\S+)\n", block)[1] for block in python_blocks("add_an_operation.md")]
    for check in (["check"], ["format", "--check"]):
        done = run(copy, "-m", "ruff", *check, *names)
        assert done.returncode == 0, done.stdout + done.stderr
    held_to = ("tests/fusions/test_tree.py", "tests/fusions/test_signatures.py")
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *held_to)
    assert done.returncode == 0, done.stdout + done.stderr
