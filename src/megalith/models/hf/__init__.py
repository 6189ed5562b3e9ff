"""Reads and writes models of Hugging Face transformers: converts config.json and tensors in both directions."""

from megalith.models.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.models.hf.families import FAMILIES, detect, fitting
from megalith.models.hf.family import Family
from megalith.models.hf.folder import ModelFolder, is_model_folder, open_folder, read_folder
from megalith.models.hf.gemma import GEMMA2, GEMMA3
from megalith.models.hf.gpt2 import GPT2
from megalith.models.hf.gpt_oss import GPT_OSS
from megalith.models.hf.llama import LLAMA
from megalith.models.hf.mistral import MISTRAL
from megalith.models.hf.mixtral import MIXTRAL
from megalith.models.hf.parameters import parameter_shapes
from megalith.models.hf.qwen import QWEN2, QWEN3
from megalith.models.hf.qwen_moe import QWEN2_MOE, QWEN3_MOE

__all__ = [
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "FAMILIES",
    "GEMMA2",
    "GEMMA3",
    "GPT2",
    "GPT_OSS",
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "Family",
    "ModelFolder",
    "detect",
    "fitting",
    "is_model_folder",
    "open_folder",
    "parameter_shapes",
    "read_folder",
]
