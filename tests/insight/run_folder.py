"""A synthetic run folder: two layouts, evaluations, baselines, samples, settings."""

import json
import math
from pathlib import Path

import numpy as np

from megalith.observe.metrics import MetricsWriter

__all__ = ["record", "write_run"]

SETTINGS = """\
model:
  num_layers: 6
  hidden_size: 256
  num_attention_heads: 8
train:
  steps: 730
  global_batch_size: 8
optim:
  lr: 0.003
  schedule: WSD
"""
SAMPLES = [
    {
        "prompt": "def read_config(path",
        "text": ', encoding=None):\n    """Read the configuration file.\n\n    The *path* is a string.\n    """\n'
        "    with open(path, encoding=encoding) as f:\n        for line in f:\n            if not line:\n"
        "                continue\n            yield line.strip()\n",
    },
    {
        "prompt": "import os",
        "text": "\nimport sys\nimport time\nfrom collections import deque\n\n__all__ = ['Error', 'open', 'close']\n\n\n"
        "class Error(Exception):\n    pass\n\n\ndef main():\n    if len(sys.argv) < 2 and not sys.stdin.isatty():\n"
        "        print('usage: <file> & more', file=sys.stderr)\n",
    },
]
ABOUT = {
    "parameters": 4_012_288,
    "model": "llama-4m",
    "recipe": "llama-4m",
    "started": "2026-02-03 14:05 UTC",
    "command": "megalith train llama-4m data.train=corpus 'model.rope={base: 1e5}' --nproc 2",
    "dtype": "bfloat16",
    "megalith": "0.1.0",
    "torch": "2.13.0+cpu",
    "python": "3.11.7",
    "system": "Linux-6.1-x86_64",
    "processor": "Intel(R) Xeon(R) Processor @ 2.10GHz",
    "cores": "2",
    "memory": "24 GiB",
}


def record(step: int, **fields: object) -> dict[str, object]:
    """A training record of the run below, with ``fields`` replaced."""
    noise = np.random.default_rng(step)
    tensor_parallel = step > 584
    lr = 3e-3 * min(step / 40, 1, max(0.02, (730 - step) / 146))
    seconds = (0.37 if tensor_parallel else 0.31) * noise.uniform(0.96, 1.08)
    compiling = {1: 31.5, 2: 2.5}.get(step, 0.0)
    return {
        "step": step,
        "loss": 2.35 + 5.3 * math.exp(-((step / 62) ** 0.62)) - 0.18 * max(0, step - 584) / 146 + noise.normal(0, 0.04),
        "grad_norm": 0.35 + 3.2 * math.exp(-step / 30) + abs(noise.normal(0, 0.07)),
        "lr": lr,
        "tokens": step * 2048,
        "tokens_per_second": 2048 / seconds,
        "step_seconds": seconds + compiling,
        "peak_memory": int(1.2e9 + 1e6 * step),
        "mfu": None,
        "layout": "tp2 dp1" if tensor_parallel else "tp1 dp2",
        "consumed_samples": step * 8,
        "time": {
            "data": 0.004,
            "forward-backward": seconds * 0.82,
            "forward-backward/forward": seconds * 0.3,
            "optimizer": seconds * 0.11,
            **({"compile": compiling} if compiling else {}),
        },
        **({"between": {"checkpoint": 0.4}} if step % 100 == 0 else {}),
        **fields,
    }


def write_run(folder: Path, steps: int = 730) -> Path:
    """Writes a run folder with everything that a report can show."""
    with MetricsWriter(folder, resumed_step=0) as metrics:
        for step in range(1, steps + 1):
            if step % 4 == 0 or step in (1, 2, steps):
                metrics.write(record(step))
            if step % 73 == 0:
                metrics.write({"step": step, "valid_loss": record(step)["loss"] + 0.06, "time": {"evaluation": 0.9}})

    evaluation = {"valid_loss": 2.243, "unigram_loss": 5.871, "bigram_loss": 3.214}
    for name, content in (("evaluation", evaluation), ("samples", SAMPLES), ("about", ABOUT)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.yaml").write_text(SETTINGS, encoding="utf-8")
    return folder
