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
_REASON = "\n- "  # before each setting that does not fit
_NUM_CLOSE = 3  # families whose reasons are listed
_WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {
        "moe.router.scaling_factor must be ": "only families with latent attention (model.mla) support this factor; to "
        "export a model of another family, train it with model.moe.router.scaling_factor=1, the default",
        "rope.interleaved must be True; got False": "to export a model, train it with model.rope.interleaved=true, as "
        "the recipe bert-tiny does; this only changes which features are paired, not what the model can learn",
        "bert.classifier_pooling must be ": "to export a model, train it with model.bert.classifier_pooling=first, "
        "because these classifiers read the first token",
        "bert.classifier_activation must be ": "to export a model, train it with this "
        "model.bert.classifier_activation: the value of model.activation for a classifier with rotary positions, tanh "
        "for any other",
    }
)


def detect(hf_config: Mapping[str, Any], *, embeds: bool = False) -> Family:
    """Returns the family of a config.json.

    It is determined by ``model_type``, then by ``architectures`` if families share it, and then by other fields. Raises
    ConfigError if there is no such family.

    Args:
        embeds: the folder has modules of sentence-transformers, which read the hidden states of any architecture.
    """
    model_type = hf_config.get("model_type")
    found = [family for family in FAMILIES if family.model_type == model_type]
    if not found:
        known = dict.fromkeys(family.model_type for family in FAMILIES)
        raise ConfigError(f"config.json must have a model_type of {', '.join(known)}; got {model_type!r:.80}")
    headless = [family for family in found if family.embeds]
    if len(found) == 1 or (embeds and headless):
        return [*headless, *found][0]
    named = hf_config.get("architectures")
    chosen = [family for family in found if isinstance(named, list) and named[:1] == [family.architecture]]
    if not chosen:
        known = dict.fromkeys(family.architecture for family in found)
        raise ConfigError(
            f"architectures in config.json of a {model_type} model must be {' or '.join(known)}, which determines the "
            f"head; got {named!r:.80}"
        )
    return next(family for family in chosen if family.has_config(hf_config))


def fitting(config: TransformerConfig) -> Family:
    """Returns the first of ``FAMILIES`` that can represent ``config``, or the part of the model that it writes.

    Raises ConfigError with the reasons of the closest families, how to fix those of the first, and how many settings of
    each other family do not fit.
    """
    refusals: dict[str, str] = {}  # by reason, without repetition: heads of one model may be families of their own
    for family in FAMILIES:
        try:
            family.require(family.written(config))
        except ConfigError as error:
            refusals.setdefault(str(error), family.architecture)
        else:
            return family
    nearest, *others = sorted(refusals, key=_distance)
    hints = [hint for reason, hint in _WAYS_OUT.items() if f"{_REASON}{reason}" in nearest]
    close, far = others[: _NUM_CLOSE - 1], others[_NUM_CLOSE - 1 :]
    counts = dict.fromkeys(f"{refusals[refusal]} {refusal.count(_REASON)}" for refusal in far)
    lines = ["no transformers architecture can represent this model; the closest:", nearest, *hints, *close]
    raise ConfigError("\n".join([*lines, f"others, by how many settings do not fit: {', '.join(counts)}"]))


def _distance(refusal: str) -> tuple[int, int]:
    """Returns how many parts of the model a family lacks, such as experts, and how many settings do not fit."""
    return len(_PART.findall(refusal)), refusal.count(_REASON)
