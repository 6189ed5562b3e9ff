"""The model class of each kind."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megalith.config import ModelKind, TransformerConfig
from megalith.models.bert_model import BertModel
from megalith.models.gpt_model import GPTModel
from megalith.models.language_model import LanguageModel
from megalith.models.t5_model import T5Model
from megalith.parallel.build_options import BuildOptions

__all__ = ["MODELS"]

MODELS: Mapping[ModelKind, Callable[[TransformerConfig, BuildOptions], LanguageModel]] = MappingProxyType(
    {"gpt": GPTModel, "bert": BertModel, "t5": T5Model}
)
