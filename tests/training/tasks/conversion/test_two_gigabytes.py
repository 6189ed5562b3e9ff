"""The commands on a 2 GB Llama in shards: their peak memory as counted by the kernel, and kill -9 while they write.

Each command runs in its own process, whose total memory is measured, including Python, torch and Megalith itself.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megalith.config import TransformerConfig
from megalith.models.hf import LLAMA
from tests.program import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process as Linux tells it"),
]

log = logging.getLogger(__name__)  # shows the figures: pytest --log-cli-level=INFO

MORE = 256 << 20  # bytes that a conversion may use beyond torch and the largest tensor
# the sizes of a Llama with 1 billion parameters, in bfloat16
CONFIG = TransformerConfig(
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=5632,
    num_attention_heads=32,
    vocab_size=32_003,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    tie_word_embeddings=False,
)
SHARD = 300 << 20  # bytes
PEAK = "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
COMMAND = f"""\
import sys
from megalith.cli.main import run
code = run()
{PEAK}
sys.exit(code)
"""
CONVERSIONS = {"import": ("source", "run"), "export": ("run", "out")}


def python(script: str, *arguments: object) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def convert(conversion: str, folder: Path) -> "subprocess.Popen[str]":
    source, made = CONVERSIONS[conversion]
    return python(COMMAND, "convert", conversion, folder / source, "--out", folder / made, "--no-proof")


def peak(process: "subprocess.Popen[str]") -> int:
    """[bytes] The peak memory of a process, from its last line of output."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return int(out.split()[-1]) * 1024


def write_shards(folder: Path) -> int:
    """Writes the model to ``folder``, one shard in memory at a time; returns the bytes of its largest tensor."""
    folder.mkdir()
    described = LLAMA.config_to_hf(CONFIG, max_position_embeddings=2048, dtype="bfloat16", eos_token_id=None)
    (folder / "config.json").write_text(json.dumps(described))
    shapes = {key: packed.shape for key, packed in LLAMA.packed(CONFIG).items()}
    most = max(map(prod, shapes.values()))
    noise = torch.randn(most + len(shapes)).bfloat16()  # a different slice for each, which is faster than drawing
    weight_map, shard, size = {}, {}, 0
    for number, (key, shape) in enumerate(shapes.items(), 1):
        shard[key] = noise[number : number + prod(shape)].view(shape).clone()
        size += shard[key].nbytes
        if size > SHARD or number == len(shapes):
            file = f"model-of-{number:05}-tensors.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return most * noise.itemsize


def num_bytes(folder: Path) -> int:
    """The size of all tensors in the folder; 0 while another process removes what a killed one left."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    except FileNotFoundError:
        return 0


def tensors(folder: Path):
    """(key, tensor) of every file, sorted by key, one at a time."""
    where = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            where |= dict.fromkeys(content.keys(), file)
    for key in sorted(where):
        with safe_open(where[key], "pt") as content:
            yield key, content.get_tensor(key)


def assert_killed_at(share: float, conversion: str, folder: Path) -> None:
    """Kills the conversion once it has written ``share`` of the tensors; nothing left behind looks complete."""
    source, made = CONVERSIONS[conversion]
    whole, staged = num_bytes(folder / source), folder / f".{made}.tmp"
    process = convert(conversion, folder)
    while num_bytes(staged) < share * whole:
        assert process.poll() is None, "it was not killed"
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / made).exists()
    if conversion == "import":
        assert not list(staged.rglob("manifest.json"))
        assert not (staged / "config.yaml").exists()
    else:
        assert not (staged / "config.json").exists()


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)  # 6 GB, which pytest would keep


def test_two_gigabytes_are_converted_in_the_stated_memory_and_killed_leave_nothing_complete(folder):
    largest = write_shards(folder / "source")
    assert num_bytes(folder / "source") > 1.9e9
    assert len(list((folder / "source").glob("*.safetensors"))) > 5
    torch_alone = peak(python(f"import torch\n{PEAK}"))
    for conversion, (_, made) in CONVERSIONS.items():
        for share in (0.02, 0.5, 0.98):
            assert_killed_at(share, conversion, folder)
        taken = peak(convert(conversion, folder)) - torch_alone
        log.info("%s: %d MiB besides torch; the largest tensor has %d", conversion, taken >> 20, largest >> 20)
        assert taken < largest + MORE
        assert not (folder / f".{made}.tmp").exists()
    for (key, want), (same, got) in zip(tensors(folder / "source"), tensors(folder / "out"), strict=True):
        assert (key, want.dtype) == (same, got.dtype)
        assert want.equal(got), key
