"""Every family that we read and write, and which one a config.json or a model is of."""

from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf.bert import BERT_FAMILIES
from megalith.models.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.models.hf.family import Family
from megalith.models.hf.gemma import GEMMA2, GEMMA3
from megalith.models.hf.gpt2 import GPT2
from megalith.models.hf.gpt_oss import GPT_OSS
from megalith.models.hf.llama import LLAMA
from megalith.models.hf.megatron_bert import MEGATRON_BERT_FAMILIES
from megalith.models.hf.mistral import MISTRAL
from megalith.models.hf.mixtral import MIXTRAL
from megalith.models.hf.qwen import QWEN2, QWEN3
from megalith.models.hf.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megalith.models.hf.roberta import ROBERTA_FAMILIES
from megalith.models.hf.t5 import T5_FAMILIES

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
    *BERT_FAMILIES,
    *ROBERTA_FAMILIES,
    *MEGATRON_BERT_FAMILIES,
    *T5_FAMILIES,
)


def detect(hf_config: Mapping[str, Any]) -> Family:
    """The family that a config.json names: by ``model_type``, ``architectures`` where several have that, and then by
    what else tells them apart.

    Raises ConfigError for any other.
    """
    model_type = hf_config.get("model_type")
    found = [family for family in FAMILIES if family.model_type == model_type]
    if not found:
        known = dict.fromkeys(family.model_type for family in FAMILIES)
        raise ConfigError(f"config.json must have a model_type of {', '.join(known)}; got {model_type!r:.80}")
    if len(found) == 1:
        return found[0]
    named = hf_config.get("architectures")
    chosen = [family for family in found if isinstance(named, list) and named[:1] == [family.architecture]]
    if not chosen:
        known = dict.fromkeys(family.architecture for family in found)
        raise ConfigError(
            f"config.json of a {model_type} model must have architectures of {' or '.join(known)}, which differ in "
            f"their heads; got {named!r:.80}"
        )
    return next(family for family in chosen if family.has_config(hf_config))


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
