"""All model families that can be read and written, and the choice of the family for a config.json or a model."""

import re
from collections.abc import Mapping
from types import MappingProxyType
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
from megalith.models.hf.roformer import ROFORMER_FAMILIES
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
    *ROFORMER_FAMILIES,
    *BERT_FAMILIES,
    *ROBERTA_FAMILIES,
    *MEGATRON_BERT_FAMILIES,
    *T5_FAMILIES,
)
_PART = re.compile(r"; got \w+Config\(")  # the value of a settings group that must be absent
_WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {
        "moe.router.scaling_factor must be ": "without latent attention (model.mla) no family has such a factor: train "
        "what is to be exported with model.moe.router.scaling_factor=1, the default",
        "rope.interleaved must be True; got False": "train what is to be exported with model.rope.interleaved=true, as "
        "the recipe bert-tiny does: it learns the same, and only which features are a pair differs",
        "bert.classifier_activation must be ": "train what is to be exported with model.bert.classifier_activation as "
        "it says; a classifier of rotary positions has model.activation there, and any other tanh",
    }
)


def detect(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    It is determined by ``model_type``, then by ``architectures`` if families share it, and then by other fields. Raises
    ConfigError if there is no such family.
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
    """Returns the first of ``FAMILIES`` that can represent ``config``, or the part of the model that it writes.

    Raises ConfigError with the reasons of each family, the closest first, and how to fix them.
    """
    refusals: list[str] = []
    for family in FAMILIES:
        try:
            family.require(family.written(config))
        except ConfigError as error:
            refusals.append(str(error))
        else:
            return family
    nearest, *others = sorted(refusals, key=_distance)
    hints = [hint for reason, hint in _WAYS_OUT.items() if f"\n- {reason}" in nearest]
    nearest = "\n".join(["no family of transformers fits; the nearest:", nearest, *hints])
    raise ConfigError("\n".join([nearest, *others]))


def _distance(refusal: str) -> tuple[int, int]:
    """Returns how many parts of the model a family lacks, such as experts, and how many settings do not fit."""
    return len(_PART.findall(refusal)), refusal.count("\n- ")
