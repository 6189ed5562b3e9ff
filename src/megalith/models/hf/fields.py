"""Reads Hugging Face's config.json field by field, and collects everything that our model cannot represent.

A field that no code reads and that is not known to be irrelevant to the network is rejected: it may change what is
computed without changing any name or shape, and then only the loss would reveal it.
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
    {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "an object", list: "a list"}
)
_LARGEST = 2**63  # limit for an integer in a float field

# fields for the library or the tokenizer, which do not affect the network
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
        "is_llama_config",  # in SmolLM2's files, not in any class
        "label2id",
        "model_type",
        "n_ctx",
        "n_special",  # in GPT-2's first files, not in any class
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "pad_token_id",
        "pooler_fc_size",  # in Google's BERT files, not in any class
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
    """The fields of ``hf_config``; null counts as absent, as in most transformers classes.

    ``keys`` are the keys of the model's tensors, if known.
    Raises ConfigError if ``model_type`` differs, or if any of ``required`` is absent.
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
            raise ConfigError(f"config.json of a {model_type} model lacks required fields: {', '.join(missing)}")

    def __getitem__(self, name: str) -> int:
        """Returns a required field; all required fields are sizes."""
        return self.get(name, 1)

    def get(self, name: str, default: T) -> T:
        """Returns the field, or ``default``, which should be that of the transformers class.

        A value of another type is recorded as a violation, and counts as absent.
        """
        found = self.optional(name, type(default))
        return default if found is None else found

    def get_or_null(self, name: str, default: T) -> T | None:
        """Like ``get``, but returns None for a null field, for classes in which null does not mean the default."""
        return None if name in self._nulls else self.get(name, default)

    def optional(self, name: str, kind: type[T]) -> T | None:
        """Returns the field, or None; a value of another type is recorded as a violation, and counts as absent."""
        self._read.add(name)
        value = self._fields.get(name)
        if kind is float and type(value) is int and abs(value) < _LARGEST:
            value = float(value)
        if value is None or type(value) is kind:
            return value
        self.refuse(f"{name} must be {_SPELLED[kind]}; got {_shown(value)}")
        return None

    def expect(self, name: str, only: bool) -> None:
        """Records a violation unless the field is absent or equals ``only``."""
        if self.get(name, only) != only:
            self.refuse(f"{name} must be {only!r}, the only supported value; got {not only!r}")

    def refuse(self, violation: str) -> None:
        """Records a violation, which ``build`` raises together with all others."""
        self._violations.append(violation)

    def build(self, **settings: Any) -> TransformerConfig:
        """Builds the config from ``settings``.

        Raises ConfigError with every violation and every field that was neither read nor is known to be irrelevant, or
        with the settings that are invalid.
        """
        if "is_encoder_decoder" not in self._read:
            self.expect("is_encoder_decoder", False)
        for name in sorted(self._fields.keys() - self._read - _INERT):
            self.refuse(
                f"{name} ({_shown(self._fields[name])}) is a field that Megalith does not know; "
                f"delete it from config.json if it does not change what the network computes"
            )
        if self._violations:
            raise ConfigError("config.json describes an unsupported model:\n- " + "\n- ".join(self._violations))
        try:
            return TransformerConfig(**settings)
        except ValidationError as error:
            wrong = [": ".join((".".join(map(str, one["loc"])), one["msg"])) for one in error.errors()]
            raise ConfigError("config.json describes an invalid model:\n- " + "\n- ".join(wrong)) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
