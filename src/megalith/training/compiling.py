"""Decides whether a run on a CPU compiles its fused operations: only if it is long enough to make up for the wait.

    saved [s] = steps x elements of a step x seconds saved on each / ranks

Elements are those that fused operations read: about four hidden states and the inner ones of the MLP per layer, and the
logits of the head. In float32 without dropout, a step takes nearly as long without the compiler: loops over blocks stay
in a core's cache. In 16 bits, uncompiled code widens and rounds each block in separate passes, which a compiled loop
does in registers; dropout costs ten rounds of integer products (Philox) per element, one pass each, and exact GELU in
float32 several passes and an erfc, where compiled code evaluates a polynomial. In 16 bits exact GELU without a gate is
torch's operator, as ReLU is in every dtype: there is nothing to compile.

Llama of 4 million parameters, 4,096 tokens a step, two cores, torch 2.13: bfloat16 0.56 to 0.69 s a step compiled,
0.71 to 0.75 s not compiled, after 22.9 s in the first step; float32 1.00 s both, after 26.7 s. On another two cores,
2,048 tokens a step in float32, three runs each: 0.41 s compiled, 0.42 to 0.45 s not compiled, after 20.9 s. Dropout and
residual of 16 MiB in float32, forward and backward: speed-up over eager PyTorch 1.13 compiled, 0.22 not compiled.
BERT of 4 million parameters with exact GELU, 2,048 tokens a step in float32, best steps: 0.33 s compiled, 0.39 s not.
"""

import os
import shutil
from pathlib import Path

from megalith.config import RunConfig, TransformerConfig
from megalith.fusions.core.compiler import cpp_compiler
from megalith.training.kept import recorded_settings
from megalith.training.process_group import choose_device

__all__ = ["compiling_pays", "missing_compiler", "with_compiling_decided"]

# on one core
_SAVED = {"float32": 1e-9, "bfloat16": 4e-9, "float16": 4e-9, "float64": 0.0}  # [s] an element
_SAVED_ON_DROPPED = 40e-9  # [s] an element that may be dropped, in any of these dtypes but float64
_SAVED_ON_EXACT_GELU = 10e-9  # [s] an element of its input, in float32
_WORTH_IT = 100.0  # [s]; compiling takes about a quarter of it, and a rank may have more than one core


def with_compiling_decided(config: RunConfig, world_size: int) -> RunConfig:
    """Returns ``config`` with ``train.compile_fusions`` decided on CPUs: as set, as the run began, or if it pays off.

    A run that resumes with another length keeps the code path that it began with, and so its numerical results. If
    nothing can be compiled, the setting becomes False.
    """
    if config.train.compile_fusions is not None or choose_device().type != "cpu":
        return config
    begun = _as_begun(config)
    wanted = compiling_pays(config, world_size) if begun is None else begun
    decided = wanted and missing_compiler() is None and os.environ.get("TORCH_COMPILE_DISABLE") != "1"
    return config.model_copy(update={"train": config.train.model_copy(update={"compile_fusions": decided})})


def compiling_pays(config: RunConfig, world_size: int) -> bool:
    """Returns whether compiled operations save well more time in the whole run than compiling takes."""
    dtype = config.precision.dtype
    tokens = config.train.steps * config.train.global_batch_size * config.data.seq_length
    elements, dropped, exact_gelu = _elements(config.model, dtype)
    saved = elements * _SAVED[dtype] + exact_gelu * _SAVED_ON_EXACT_GELU
    if dtype != "float64":
        saved += dropped * _SAVED_ON_DROPPED
    return tokens * saved / world_size > _WORTH_IT


def missing_compiler() -> str | None:
    """Returns the C++ compiler that torch.compile would call if it is not installed, else None."""
    return None if shutil.which(cpp_compiler()) else cpp_compiler()


def _elements(model: TransformerConfig, dtype: str) -> tuple[int, int, int]:
    """Returns how many elements per token fused operations read, and how many of them dropout and exact GELU read.

    Exact GELU counts in float32 alone.
    """
    H, F = model.hidden_size, model.ffn_hidden_size
    if model.moe is not None:
        F = model.moe.top_k * model.expert_ffn_hidden_size + (model.moe.shared_ffn_hidden_size or 0)
    num_layers = model.num_layers + (0 if model.t5 is None else model.t5.num_decoder_layers)
    inner = F if model.gate_activation is None else 2 * F
    if model.activation == "relu" or (model.activation == "gelu" and dtype in ("bfloat16", "float16")):
        inner = 0  # torch's own operator
    dropped = (2 * num_layers * H if model.hidden_dropout else 0) + (H if model.embedding_dropout else 0)
    is_exact = dtype == "float32" and "gelu" in (model.activation, model.gate_activation)
    return num_layers * (4 * H + inner) + (model.vocab_size or 0), dropped, num_layers * F if is_exact else 0


def _as_begun(config: RunConfig) -> bool | None:
    """Returns what the run in ``config.run`` decided in the same dtype; None if there is no such run or decision."""
    match recorded_settings(Path(config.run)):  # None if it cannot be read, which is reported when the run resumes
        case {"train": {"compile_fusions": bool(begun)}, "precision": {"dtype": dtype}}:
            return begun if dtype == config.precision.dtype else None
    return None
