"""Hugging Face's BERT, one family for each head.

``BertForPreTraining``, ``BertForMaskedLM``, ``BertForSequenceClassification``, ``BertForMultipleChoice``, and for
embeddings ``BertModel``, which has no head.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.family import NOTHING, Family
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place
from megalith.models.hf.sentence_modules import DENSE

__all__ = [
    "BERT_CLASSIFICATION",
    "BERT_EMBEDDING",
    "BERT_FAMILIES",
    "BERT_HEADS",
    "BERT_MASKED_LM",
    "BERT_MULTIPLE_CHOICE",
    "BERT_PRETRAINING",
    "allowed_of_encoder",
    "encoder_family",
    "read_encoder",
    "write_encoder",
]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}

_CLASSIFIERS = ("classification", "multiple_choice")
_ONE_OF_CLASSES = "single_label_classification"
# our module -> theirs, without the prefix of the base model
_OUTSIDE = {
    "model.embed_tokens": "embeddings.word_embeddings",
    "model.embed_positions": "embeddings.position_embeddings",
    "model.embed_token_types": "embeddings.token_type_embeddings",
    "model.embed_norm": "embeddings.LayerNorm",
    "model.norm": "encoder.ln",
}
_OF_LAYERS = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
# the norms after each part of a layer
_NORMS = {"post_attention_layernorm": "attention.output.LayerNorm", "post_mlp_layernorm": "output.LayerNorm"}
BERT_HEADS: Mapping[str, str] = MappingProxyType(
    {
        "lm_transform.dense": "cls.predictions.transform.dense",
        "lm_transform.norm": "cls.predictions.transform.LayerNorm",
        "lm_head": "cls.predictions",
        "pooler.dense": "bert.pooler.dense",
        "binary_head.linear": "cls.seq_relationship",
        "classifier.linear": "classifier",
    }
)

# parts of files that an embedding does not depend on: the pooler, and the heads that classes with the prefix have
_UNREAD = re.compile(r"(pooler|cls|lm_head|classifier)\..+")
_EMBEDDING_SETTINGS = ("embedding_pooling", "embedding_size", "normalize_embeddings", "similarity_temperature")

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_hidden_size",
    }
)
_FIELDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "layer_norm_eps": ("layernorm_epsilon", 1e-12),
        "hidden_dropout_prob": ("hidden_dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1),
        "initializer_range": ("init_method_std", 0.02),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    }
)


def read_encoder(
    fields: Fields, head: Mapping[str, Any], *, position_offset: int = 0, norm_placement: str = "post"
) -> dict[str, Any]:
    """Returns the settings that are not in the tables of fields; ``head`` are those of ``model.bert`` for the head."""
    activation = fields.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        fields.refuse(f"hidden_act must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
    if (positions := fields.get("position_embedding_type", "absolute")) != "absolute":
        fields.refuse(f"position_embedding_type must be 'absolute'; got {positions!r}")
    fields.expect("is_decoder", False)
    fields.expect("add_cross_attention", False)
    dropout = fields.optional("classifier_dropout", float)
    bert = {"num_token_types": fields.get("type_vocab_size", 2), "position_offset": position_offset or None, **head}
    if head["head"] in _CLASSIFIERS:
        bert["classifier_dropout"] = dropout
    if head["head"] == "classification":
        bert["num_classes"] = len(fields.get("id2label", {0: "", 1: ""}))
        if bert["num_classes"] < 2:
            fields.refuse(
                f"id2label must have at least 2 classes; got {bert['num_classes']}, and a head for regression is not "
                "supported; to import the encoder without it: "
                "transformers.AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER), and "
                "copy tokenizer.json"
            )
        if (problem := fields.optional("problem_type", str)) not in (None, _ONE_OF_CLASSES):
            fields.refuse(f"problem_type must be {_ONE_OF_CLASSES!r}, one class for each text; got {problem!r}")
    return {
        "normalization": "LayerNorm",
        "activation": _ACTIVATIONS.get(activation),
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": fields.get("max_position_embeddings", 512) - position_offset,
        "residual": {"norm_placement": norm_placement},
        "bert": bert,
    }


def write_encoder(config: TransformerConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Returns the fields that ``read_encoder`` reads; learned positions keep the model's own number."""
    bert, learned = config.bert, config.max_position_embeddings
    assert bert is not None, "allowed_of_encoder requires it"
    written: dict[str, Any] = {
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
        "max_position_embeddings": max_position_embeddings if learned is None else learned + bert.position_offset,
        "type_vocab_size": bert.num_token_types,
        "is_decoder": False,
    }
    if bert.head in _CLASSIFIERS:
        written["classifier_dropout"] = bert.classifier_dropout
    if bert.num_classes is not None:
        written["id2label"] = {str(number): f"LABEL_{number}" for number in range(bert.num_classes)}
        written["label2id"] = {f"LABEL_{number}": number for number in range(bert.num_classes)}
    return written


def allowed_of_encoder(
    config: TransformerConfig, head: Mapping[str, Any], norm_placement: str = "post"
) -> dict[str, tuple[Any, ...]]:
    """Returns the values of our settings that such an encoder supports; ``head`` are those of ``model.bert``."""
    num_types = 1 if config.bert is None else max(config.bert.num_token_types, 1)
    return {
        "normalization": ("LayerNorm",),
        "position_embedding_type": ("learned_absolute",),
        "activation": ("gelu", "gelu_tanh", "relu"),
        "add_bias_linear": (True,),
        "qkv_bias": (True,),
        "output_bias": (True,),
        "mlp_bias": (True,),
        "num_query_groups": (config.num_attention_heads,),
        "kv_channels": (config.hidden_size / config.num_attention_heads,),
        "residual.norm_placement": (norm_placement,),
        "residual.embedding_dropout": (None, config.hidden_dropout),
        # an untied model of theirs has two vocabulary biases
        **({"tie_word_embeddings": (True,)} if head["head"] == "pretraining" else {}),
        **left_open(config, "attention.qkv_bias", "attention.output_bias"),
        **left_open(config, "bert.num_classes", "bert.classifier_dropout"),
        **left_open(config, *(f"bert.{name}" for name in _EMBEDDING_SETTINGS if head["head"] == "embedding")),
        "bert.position_offset": (0,),
        "bert.num_token_types": (num_types,),
        **{f"bert.{name}": (value,) for name, value in head.items()},
    }


def encoder_family(
    model_type: str,
    architecture: str,
    head: Mapping[str, Any],
    *,
    heads: Mapping[str, str] = BERT_HEADS,
    norms: Mapping[str, str] = _NORMS,
    prefix: str = "bert.",
) -> Family:
    """Returns BERT's table with other module names; an encoder with more differences replaces further entries.

    Args:
        head: the ``model.bert`` settings of this architecture's head.
        heads, norms: our head modules and layer norms -> theirs.
        prefix: key prefix of their base model in models with a head; for embeddings the family is the base model.
    """
    read: Callable[[Fields], Mapping[str, Any]] = partial(read_encoder, head=head)
    of_tokens = heads["lm_head"] if head["head"] == "pretraining" else None
    embeds = head["head"] == "embedding"
    outer_prefix, prefix = (prefix, "") if embeds else ("", prefix)
    heads = {"embedder.projection": f"{DENSE}/linear"} if embeds else heads
    return Family(
        model_type=model_type,
        architecture=architecture,
        sizes=_SIZES,
        fields=_FIELDS,
        read_rest=read,
        write_rest=write_encoder,
        allowed=partial(allowed_of_encoder, head=head),
        place=partial(_place, prefix=prefix, heads=heads, norms=norms),
        buffers=re.compile(re.escape(f"{prefix}embeddings.position_ids")),
        prefix=prefix,
        head=f"{of_tokens}.decoder.weight" if of_tokens else None,
        aliases=MappingProxyType({f"{of_tokens}.decoder.bias": f"{of_tokens}.bias"} if of_tokens else {}),
        embeds=embeds,
        outer_prefix=outer_prefix,
        unread=_UNREAD if embeds else NOTHING,
    )


def _place(name: str, prefix: str, heads: Mapping[str, str], norms: Mapping[str, str]) -> Place:
    """Returns the place of our tensor ``name``; other arguments as in ``encoder_family``."""
    module, part = name.rsplit(".", 1)
    if module in heads:
        return Place(f"{heads[module]}.{part}")
    if module in _OUTSIDE:
        return Place(f"{prefix}{_OUTSIDE[module]}.{part}")
    _, _, layer, module = module.split(".", 3)  # model.layers.<layer>.<module>
    theirs = norms[module] if module in norms else _OF_LAYERS[module]
    return Place(f"{prefix}encoder.layer.{layer}.{theirs}.{part}")


def _family(architecture: str, **head: Any) -> Family:
    # names in Google's files, including the original release
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return replace(encoder_family("bert", architecture, head), renamed=MappingProxyType(renamed))


BERT_PRETRAINING = _family("BertForPreTraining", head="pretraining", binary_head=True)
BERT_MASKED_LM = _family("BertForMaskedLM", head="pretraining", binary_head=False)
BERT_CLASSIFICATION = _family("BertForSequenceClassification", head="classification")
BERT_MULTIPLE_CHOICE = _family("BertForMultipleChoice", head="multiple_choice")
BERT_EMBEDDING = _family("BertModel", head="embedding")
BERT_FAMILIES = (BERT_PRETRAINING, BERT_MASKED_LM, BERT_CLASSIFICATION, BERT_MULTIPLE_CHOICE, BERT_EMBEDDING)
