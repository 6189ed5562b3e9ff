"""The code of docs/checkpoints.md reads what any layout wrote, without Megalith."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalith.checkpoint import save_checkpoint
from megalith.checkpoint.folders import step_name
from tests.checkpoint.layouts import LAYOUTS, Layout, full_tensors, in_layout, local_bits
from tests.rank_pool import ranks

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def code():
    """The Python blocks of the page, each run in its own namespace."""
    namespaces = []
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        namespaces.append({"__source__": block})
        exec(block, namespaces[-1])
    return namespaces


def save_all(folder: Path, layouts: list[Layout]) -> None:
    for step, layout in enumerate(layouts):
        save_checkpoint(folder, step, in_layout(full_tensors(step), layout), {"layout": layout}, keep_last=100)


def test_the_reader_of_the_page_gives_every_tensor_whole(tmp_path, code):
    read_checkpoint = code[0]["read_checkpoint"]
    ranks(4, save_all, tmp_path, LAYOUTS[4])
    for step, layout in enumerate(LAYOUTS[4]):
        tensors, state = read_checkpoint(tmp_path / step_name(step))
        assert local_bits(tensors) == local_bits(full_tensors(step))
        assert state == {"layout": list(layout)}
    shard = next((tmp_path / step_name(0)).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=f"{shard.name} is damaged"):
        read_checkpoint(tmp_path / step_name(0))


def test_the_reader_is_twenty_lines_and_imports_nothing_of_ours(code):
    source = code[0]["__source__"]
    body = source[source.index("def ") :].strip().splitlines()
    assert len(body) <= 20
    program = source + "import sys; assert not any(name.startswith('megalith') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_loop_of_the_page_saves_beside_training(tmp_path, code, capsys):
    w = torch.zeros(3)
    code[1]["train_and_save"](tmp_path, {"w": w}, lambda: w.add_(1.0), num_steps=5, every=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [step_name(2), step_name(4)]
    assert code[0]["read_checkpoint"](tmp_path / step_name(4))[0]["w"].tolist() == [4.0] * 3
    assert capsys.readouterr().out.count("saved ") == 2


def test_the_calls_of_the_page_save_and_load(tmp_path, code):
    assert code[2]["save_and_load"](tmp_path, {"w": torch.ones(3)}) == {"step": 100}
