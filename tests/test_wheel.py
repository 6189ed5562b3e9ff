"""The wheel: one for all machines, with recipes and style sheet, built without a compiler."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [found] = folder.iterdir()
    return found


def test_one_wheel_serves_every_machine(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_it_holds_what_is_no_python(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in ("py.typed", "recipes/llama-4m.yaml", "recipes/presets/llama-4m.yaml", "insight/report.css"):
        assert f"megalith/{wanted}" in names
    assert not any(name.startswith("tests/") for name in names)


def test_it_runs_from_an_empty_folder_with_no_compiler_on_the_path(wheel, tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import megalith; assert '.whl' in megalith.__file__;"
        "import torch; from megalith.config import TransformerConfig; from megalith.models.gpt_model import GPTModel;"
        "m = GPTModel(TransformerConfig(vocab_size=7, num_layers=1, hidden_size=8, num_attention_heads=2));"
        "t = torch.tensor([[1, 2, 3]]); m(t, labels=t).sum().backward(); print('trained')"
    )
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "/nonexistent", "CC": "/nonexistent"}
    found = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout == "trained\n", found.stderr
