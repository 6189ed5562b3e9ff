"""Greedy generation by a 34M-parameter Llama on the CPU: ours compared with Hugging Face's, from ragged prompts.

Every contender has the same random weights and continues the same prompts. The reference is Hugging Face's model in
float32. Dtypes round differently, so a text may differ from the reference's, but only from a token on where the two
likeliest tokens are nearly equally likely: the distance of their logits there is the error.

B prompts of up to S tokens, each shorter than the one before.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.case import Case, Contender, First
from megalith.config import TransformerConfig
from megalith.models.generation import generate
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import LLAMA, parameter_shapes
from megalith.models.sampling import Sampling
from megalith.optional import need
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.inference_linear import inference_linear
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.gpt_size import flops_per_token

__all__ = ["CASES", "Size"]

Texts = list[list[int]]
_SHORTER = 4  # tokens


@dataclass(frozen=True)
class Size:
    """``B`` prompts, the longest of ``S`` tokens, each continued by ``new`` tokens."""

    config: TransformerConfig
    S: int
    B: int
    new: int


class Generation:
    """``texts()`` generates the new tokens of every prompt."""

    def __init__(self, texts: Callable[[], Texts], folder: Path) -> None:
        self._texts, self._folder = texts, folder

    def first(self) -> First:
        """The first run; comparing its texts is not timed."""
        start = time.perf_counter()
        texts = self._texts()
        return First(time.perf_counter() - start, self._error(texts), None)

    def run(self) -> None:
        self._texts()

    def _error(self, texts: Texts) -> float:
        """The distance of the reference's two largest logits where a text first differs, for the worst text."""
        reference = json.loads((self._folder / "reference.json").read_text())
        errors = [0.0]
        for text, want, margins in zip(texts, reference["texts"], reference["margins"], strict=True):
            differs = [a != b for a, b in zip(text, want, strict=True)]
            if any(differs):
                errors.append(margins[differs.index(True)])
        return max(errors)


def _ours(size: Size, folder: Path, *, dtype: torch.dtype) -> Generation:
    """``generate`` on a ``GPTModel`` built as by ``megalith generate``."""
    options = BuildOptions(ProcessGroupCollection.single(), dtype, matrix_product=inference_linear)
    model = GPTModel(size.config, options).eval()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    prompts = _prompts(size)
    return Generation(lambda: generate(model, prompts, size.new, sampling=Sampling(0.0)), folder)


def _theirs(size: Size, folder: Path, *, dtype: torch.dtype) -> Generation:
    """``generate`` of Hugging Face's ``LlamaForCausalLM``, with its cache."""
    model = _hugging_face_model(size, folder).to(dtype)
    return Generation(lambda: _their_texts(model, size).sequences[:, size.S :].tolist(), folder)


def _hugging_face_model(size: Size, folder: Path) -> Any:
    transformers = need("transformers")
    fields = LLAMA.config_to_hf(size.config, max_position_embeddings=2048, dtype="float32", eos_token_id=None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model


def _their_texts(model: Any, size: Size, **how: Any) -> Any:
    prompts = _prompts(size)
    pads = [size.S - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (size.S - pad) for pad in pads])
    return model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=size.new,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        **how,
    )


def _prompts(size: Size) -> Sequence[list[int]]:
    V = size.config.vocab_size
    assert V is not None, "every size has one"
    drawn = torch.randint(1, V, (size.B, size.S), generator=torch.Generator().manual_seed(1)).tolist()
    return [row[: size.S - _SHORTER * number] for number, row in enumerate(drawn)]


def _prepare(size: Size, folder: Path) -> None:
    """Writes the weights, and the float32 reference's results for the prompts."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in parameter_shapes(size.config).items():
        noise = 0.02 * torch.randn(shape, generator=generator)
        weights[name] = 1 + noise if len(shape) == 1 else noise  # norms are about one
    save_file(weights, folder / "weights.safetensors")
    found = _their_texts(_hugging_face_model(size, folder), size, output_logits=True)
    largest = torch.stack(found.logits, dim=1).topk(2).values  # [B, new, 2]
    margins = (largest[..., 0] - largest[..., 1]).tolist()
    texts = found.sequences[:, size.S :].tolist()
    (folder / "reference.json").write_text(json.dumps({"texts": texts, "margins": margins}))


def _flops(size: Size) -> int:
    """The forward alone, a third of a training step."""
    assert size.config.vocab_size is not None, "every size has one"
    tokens = sum(map(len, _prompts(size))) + size.B * size.new
    return tokens * flops_per_token(size.config, size.config.vocab_size, size.S + size.new) // 3


def _size(L: int, H: int, A: int, F: int, V: int, S: int, B: int, new: int) -> Size:
    config = TransformerConfig(
        num_layers=L, hidden_size=H, num_attention_heads=A, ffn_hidden_size=F, vocab_size=V, layernorm_epsilon=1e-6
    )
    return Size(config, S, B, new)


def _case(B: int, dtype: torch.dtype, tolerance: float) -> Case:
    name = str(dtype).removeprefix("torch.")
    return Case(
        title=f"CPU generation, Llama shape, batch {B}, {name}",
        base="Hugging Face",
        contenders={
            "Megalith": Contender(functools.partial(_ours, dtype=dtype), name),
            "Hugging Face": Contender(functools.partial(_theirs, dtype=dtype), name),
        },
        sizes={
            "full": _size(L=8, H=512, A=8, F=1408, V=8192, S=64, B=B, new=128),
            "quick": _size(L=2, H=64, A=4, F=128, V=256, S=32, B=B, new=8),
        },
        prepare=_prepare,
        tokens=lambda size: size.B * size.new,
        flops=_flops,
        loss_tolerance=tolerance,
    )


# logits have a standard deviation of 0.45: float32 agrees to 1e-5, and bfloat16 keeps 8 bits
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}

CASES = {
    f"generate-{B}-{str(dtype).removeprefix('torch.')}": _case(B, dtype, tolerance)
    for B in (1, 8)
    for dtype, tolerance in _TOLERANCE.items()
}
