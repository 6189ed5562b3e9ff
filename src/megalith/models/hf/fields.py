"""Reads Hugging Face's config.json field by field, and collects what our model cannot represent.

A field that nobody reads and that is not known to leave the network alone is refused: it may change what is computed
without changing a single name or shape, and then only the loss would tell.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from megalith.config import TransformerConfig
from megalith.errors import ConfigError

__all__ = ["Fields"]

T = TypeVar("T")

_SPELLED: Mapping[type, str] = MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "an object", list: "a list"}
)
_LARGEST = 2**63  # of a whole number where a number is wanted

# what the library or a tokenizer needs to know, and the network does not
_INERT = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "directionality",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_llama_config",  # of SmolLM2, and in no class
        "label2id",
        "model_type",
        "n_ctx",
        "n_special",  # of GPT-2's first files, and in no class
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "pad_token_id",
        "pooler_fc_size",  # of BERT in files of Google, and in no class
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "predict_special_tokens",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    ]
)


class Fields:
    """The fields of ``hf_config``; null counts as absent, as in most classes of transformers.

    ``keys`` are those of the tensors beside it, as far as they are known.
    Raises ConfigError if ``model_type`` is another one, or if any of ``required`` is absent.
    """

    def __init__(
        self, hf_config: Mapping[str, Any], model_type: str, required: tuple[str, ...], keys: Collection[str] = ()
    ) -> None:
        self.keys = keys
        self._fields = {name: value for name, value in hf_config.items() if value is not None}
        self._nulls = hf_config.keys() - self._fields.keys()
        self._read = set(required)
        self._violations: list[str] = []
        if (given := self._fields.get("model_type")) != model_type:
            raise ConfigError(f"config.json must have model_type {model_type!r}; got {_shown(given)}")
        if missing := [name for name in required if name not in self._fields]:
            raise ConfigError(f"config.json of a {model_type} model must have {', '.join(missing)}; it does not")

    def __getitem__(self, name: str) -> int:
        """A required field, all of which are sizes."""
        return self.get(name, 1)

    def get(self, name: str, default: T) -> T:
        """The field, or ``default``, which is the one of transformers' own class for it.

        A value of another type is noted as a violation, and counts as absent.
        """
        found = self.optional(name, type(default))
        return default if found is None else found

    def get_or_null(self, name: str, default: T) -> T | None:
        """As ``get``, but None where the field is null and their class does not take that for its default."""
        return None if name in self._nulls else self.get(name, default)

    def optional(self, name: str, kind: type[T]) -> T | None:
        """The field, or None; a value that is no ``kind`` is noted as a violation, and counts as absent."""
        self._read.add(name)
        value = self._fields.get(name)
        if kind is float and type(value) is int and abs(value) < _LARGEST:
            value = float(value)
        if value is None or type(value) is kind:
            return value
        self.refuse(f"{name} must be {_SPELLED[kind]}; got {_shown(value)}")
        return None

    def expect(self, name: str, only: bool) -> None:
        """Notes a violation unless the field is absent or equals ``only``."""
        if self.get(name, only) != only:
            self.refuse(f"{name} must be {only!r}, the only value our model has; got {not only!r}")

    def refuse(self, violation: str) -> None:
        """Notes a violation, for ``build`` to raise together with all others."""
        self._violations.append(violation)

    def build(self, **settings: Any) -> TransformerConfig:
        """The config with ``settings``, made of what was read.

        Raises ConfigError with every violation, every field that was not read and is not known to be inert, or what
        is malformed.
        """
        if "is_encoder_decoder" not in self._read:
            self.expect("is_encoder_decoder", False)
        for name in sorted(self._fields.keys() - self._read - _INERT):
            self.refuse(
                f"{name} ({_shown(self._fields[name])}) is a field that our model does not know; "
                f"delete it from config.json if it does not change what the network computes"
            )
        if self._violations:
            raise ConfigError("config.json asks for what our model does not have:\n- " + "\n- ".join(self._violations))
        try:
            return TransformerConfig(**settings)
        except ValidationError as error:
            wrong = [": ".join((".".join(map(str, one["loc"])), one["msg"])) for one in error.errors()]
            raise ConfigError("config.json gives a model that cannot be:\n- " + "\n- ".join(wrong)) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
