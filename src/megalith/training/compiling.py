"""Whether a run on a CPU compiles its fused operations: where it is long enough to repay the wait.

    saved [s] = steps x elements of a step x seconds saved on each / ranks

Elements are those that fused operations read: of a layer about four hidden states and the inner ones of its MLP, of the
head the logits. In float32, where nothing is dropped, a step takes nearly as long without the compiler: loops over
blocks stay in a core's cache. In 16 bits a block is widened and rounded by passes of its own, which a compiled loop
does in registers; a dropped element costs ten rounds of integer products (Philox), one pass each.

Llama of 4 million parameters, 4,096 tokens a step, two cores, torch 2.13: bfloat16 0.56 to 0.69 s a step compiled,
0.71 to 0.75 s not, after 22.9 s in the first step; float32 1.00 s both, after 26.7 s. On another two cores, 2,048
tokens a step in float32, three runs each: 0.41 s compiled, 0.42 to 0.45 s not, after 20.9 s. Dropout and residual of
16 MiB in float32, forward and backward, against torch's own: a speed-up of 1.13 compiled, of 0.22 not.
"""

import os
import shutil
from pathlib import Path

from megalith.config import RunConfig, TransformerConfig
from megalith.config.yaml_text import MOST_BYTES, read_yaml
from megalith.errors import ConfigError
from megalith.training.process_group import choose_device

__all__ = ["compiling_pays", "missing_compiler", "with_compiling_decided"]

# of one core
_SAVED = {"float32": 1e-9, "bfloat16": 4e-9, "float16": 4e-9, "float64": 0.0}  # [s] an element
_SAVED_ON_DROPPED = 40e-9  # [s] an element that may be dropped, in any of these dtypes but float64
_WORTH_IT = 100.0  # [s]; building takes about a quarter of it, and a rank may have more cores than one


def with_compiling_decided(config: RunConfig, world_size: int) -> RunConfig:
    """``config`` whose ``train.compile_fusions`` is decided where a CPU computes: as given, as begun, or as it pays.

    A run that goes on in another length keeps the code that it began with, and so its numbers. Where nothing can be
    compiled, nothing is.
    """
    if config.train.compile_fusions is not None or choose_device().type != "cpu":
        return config
    begun = _as_begun(config)
    wanted = compiling_pays(config, world_size) if begun is None else begun
    decided = wanted and missing_compiler() is None and os.environ.get("TORCH_COMPILE_DISABLE") != "1"
    return config.model_copy(update={"train": config.train.model_copy(update={"compile_fusions": decided})})


def compiling_pays(config: RunConfig, world_size: int) -> bool:
    """Whether what compiled operations save in the whole run is well above the wait for them."""
    dtype = config.precision.dtype
    tokens = config.train.steps * config.train.global_batch_size * config.data.seq_length
    elements, dropped = _elements(config.model)
    saved = elements * _SAVED[dtype] + dropped * (_SAVED_ON_DROPPED if dtype != "float64" else 0.0)
    return tokens * saved / world_size > _WORTH_IT


def missing_compiler() -> str | None:
    """The C++ compiler that torch.compile would call, where it is not here."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else compiler


def _elements(model: TransformerConfig) -> tuple[int, int]:
    """How many elements of a token fused operations read, and how many of them may be dropped."""
    H, F = model.hidden_size, model.ffn_hidden_size
    if model.moe is not None:
        F = model.moe.top_k * model.expert_ffn_hidden_size + (model.moe.shared_ffn_hidden_size or 0)
    num_layers = model.num_layers + (0 if model.t5 is None else model.t5.num_decoder_layers)
    inner = F if model.gate_activation is None else 2 * F
    dropped = (2 * num_layers * H if model.hidden_dropout else 0) + (H if model.embedding_dropout else 0)
    return num_layers * (4 * H + inner) + (model.vocab_size or 0), dropped


def _as_begun(config: RunConfig) -> bool | None:
    """What the run in ``config.run`` has decided, in the same dtype; None where there is none, or it does not say."""
    path = Path(config.run) / "config.yaml"
    try:
        with path.open("rb") as file:
            settings = read_yaml(file.read(MOST_BYTES + 1), str(path))
    except (OSError, ConfigError):  # what resumes from it says what is wrong
        return None
    match settings:
        case {"train": {"compile_fusions": bool(begun)}, "precision": {"dtype": dtype}}:
            return begun if dtype == config.precision.dtype else None
    return None
