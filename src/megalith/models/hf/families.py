"""Every family that we read and write, and which one a config.json or a model is of."""

from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.models.hf.family import Family
from megalith.models.hf.gemma import GEMMA2, GEMMA3
from megalith.models.hf.gpt2 import GPT2
from megalith.models.hf.gpt_oss import GPT_OSS
from megalith.models.hf.llama import LLAMA
from megalith.models.hf.mistral import MISTRAL
from megalith.models.hf.mixtral import MIXTRAL
from megalith.models.hf.qwen import QWEN2, QWEN3
from megalith.models.hf.qwen_moe import QWEN2_MOE, QWEN3_MOE

__all__ = ["FAMILIES", "detect", "fitting"]

FAMILIES = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GPT2,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
)


def detect(hf_config: Mapping[str, Any]) -> Family:
    """The family that the ``model_type`` of a config.json names. Raises ConfigError for any other."""
    model_type = hf_config.get("model_type")
    found = {family.model_type: family for family in FAMILIES}
    if not isinstance(model_type, str) or model_type not in found:
        raise ConfigError(f"config.json must have a model_type of {', '.join(found)}; got {model_type!r:.80}")
    return found[model_type]


def fitting(config: TransformerConfig) -> Family:
    """The first of ``FAMILIES`` that can represent ``config``. Raises ConfigError with the reasons of each."""
    refusals = []
    for family in FAMILIES:
        try:
            family.require(config)
        except ConfigError as error:
            refusals.append(str(error))
        else:
            return family
    raise ConfigError("\n".join(refusals))
