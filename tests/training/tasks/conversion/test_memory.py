"""Converting needs memory for the largest tensor and less than 256 MB more, by the kernel's peak count."""

import json
import resource
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalith.config import TransformerConfig
from megalith.models.hf import GPT2, GPT_OSS, LLAMA, MIXTRAL, parameter_shapes
from megalith.training.tasks.conversion import export_model, import_model
from tests.rank_pool import ranks
from tests.tiny_run import GPT2 as GPT2_SHAPE
from tests.tiny_run import LLAMA as LLAMA_SHAPE

MORE = 256 << 20
LARGE = {"num_layers": 10, "hidden_size": 768, "ffn_hidden_size": 3072}
LARGE_EXPERTS = {"num_layers": 4, "hidden_size": 768, "ffn_hidden_size": 1024, "moe": {"num_experts": 8}}
GPT_OSS_EXPERTS = {"activation": "quick_geglu", "mlp_bias": True, "moe": {"num_experts": 8, "router": {"bias": True}}}
MODELS = {
    # the largest tensor is the embedding; of gpt2, a transposed weight
    "llama": (LLAMA, TransformerConfig(**LLAMA_SHAPE | LARGE | {"vocab_size": 20_011})),
    # the largest tensor is that of all experts in ours; for gpt-oss in theirs too, interleaved
    "mixtral": (MIXTRAL, TransformerConfig(**LLAMA_SHAPE | LARGE_EXPERTS)),
    "gpt-oss": (
        GPT_OSS,
        TransformerConfig(
            **LLAMA_SHAPE | LARGE_EXPERTS | GPT_OSS_EXPERTS,
            attention={"softmax": "learnable"},
            glu={"clamp": 7.0, "offset": 1.0},
        ),
    ),
    "gpt2": (GPT2, TransformerConfig(**GPT2_SHAPE | LARGE | {"vocab_size": 1009, "max_position_embeddings": 64})),
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown(folder: Path) -> tuple[int, int]:
    """How many bytes this process's peak grows in an import and then an export of ``folder``."""
    import_model(folder / "small", folder / "small run", with_proof=False)  # warms up imports and caches
    export_model(folder / "small run", folder / "small out", with_proof=False)
    before = peak()
    import_model(folder / "large", folder / "run", with_proof=False)
    between = peak()
    export_model(folder / "run", folder / "out", with_proof=False)
    return between - before, peak() - between


def write(folder: Path, family, config: TransformerConfig) -> int:
    """Writes a model folder of random, finite bytes; returns the size of its largest tensor, or of ours."""
    folder.mkdir()
    described = family.config_to_hf(config, max_position_embeddings=64, dtype="float32", eos_token_id=None)
    (folder / "config.json").write_text(json.dumps(described))
    tensors = {key: torch.rand(packed.shape) for key, packed in family.packed(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    of_ours = (4 * prod(shape) for shape in parameter_shapes(config).values())
    return max(*(tensor.nbytes for tensor in tensors.values()), *of_ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_converting_holds_little_more_than_the_largest_tensor(name, tmp_path):
    family, config = MODELS[name]
    write(tmp_path / "small", family, config.model_copy(update={"num_layers": 1, "vocab_size": 11}))
    largest = write(tmp_path / "large", family, config)
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 250 << 20
    [rises] = ranks(1, grown, tmp_path)
    # a tenth of the limit: two tensors at a time, or retained pages of a memory map, would exceed it
    assert all(rise < largest + MORE // 10 for rise in rises), (rises, largest)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == size
