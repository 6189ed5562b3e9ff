"""The files that sentence-transformers keeps beside a headless encoder: how embeddings follow from its hidden states.

    modules.json                        the modules in order: Transformer, Pooling, then Dense and Normalize if any
    1_Pooling/config.json               first token or mean
    2_Dense/config.json                 the projection's sizes and activation; its tensors in model.safetensors
    sentence_bert_config.json           max_seq_length, in tokens
    config_sentence_transformers.json   which similarity compares embeddings, and prompts in front of texts

All files are read as data: a module's class is compared with known names, and no class or function that a file names is
imported. https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html describes the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.settings_group import LARGEST_SIZE
from megalith.data.companions import LOWERCASE, PROMPTS, SENTENCE_MODEL, SENTENCE_TRANSFORMER, SIMILARITY
from megalith.errors import ConfigError
from megalith.models.hf.json_file import read_json, read_json_list
from megalith.storage import Store

__all__ = ["DENSE", "MODULES", "SentenceModules", "is_sentence_model", "read_modules"]

MODULES = "modules.json"
DENSE = "2_Dense"  # where an export puts the projection, and the first part of its tensors' keys in our tables
_CONFIG = "config.json"
_MODEL_TYPE = "SentenceTransformer"
_MOST_MODULES = 16
# the accepted sequences; each module has these names in all versions, in packages that have moved
_SEQUENCES = tuple(
    ("Transformer", "Pooling", *dense, *norm) for dense in ((), ("Dense",)) for norm in ((), ("Normalize",))
)
_POOLINGS = {"cls": "first", "mean": "mean"}
_MODE = "pooling_mode"
# before version 5.4 each mode had a field of its own
_OLD_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_SENTENCE = "sentence_embedding"
_NAMES = {"module_input_name": (_SENTENCE,), "module_output_name": (_SENTENCE, None)}
_IDENTITIES = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")
# fields of the Transformer module that change what is pooled; those of texts do not
_OF_TRANSFORMER: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "model_args": ({}, None),
    "config_args": ({}, None),
    "processing_kwargs": ({}, None),
}
_OF_TEXTS = ("max_seq_length", LOWERCASE, "tokenizer_args", "cache_dir", "unpad_inputs")


@dataclass(frozen=True)
class SentenceModules:
    """The modules after the encoder.

    Attributes:
        settings: those of ``model.bert`` that describe them.
        dense: the folder of the projection; None if there is none.
        notes: what only the texts or the comparison of embeddings depend on, and Megalith does not do; one line each.
    """

    settings: Mapping[str, Any]
    dense: str | None = None
    notes: tuple[str, ...] = ()

    def of(self, config: TransformerConfig) -> TransformerConfig:
        """Returns ``config``, an encoder with the embedding head, with these settings of the head."""
        assert config.bert is not None, "only families of embeddings have modules"
        return config.model_copy(update={"bert": config.bert.model_copy(update=dict(self.settings))})


def is_sentence_model(store: Store) -> bool:
    """Whether the folder has modules that turn hidden states into one embedding per text; a cross-encoder has none."""
    names = store.names()
    if MODULES not in names:
        return False
    return bool(_of_model(store).get("model_type", _MODEL_TYPE) == _MODEL_TYPE)


def read_modules(store: Store, hidden_size: int) -> SentenceModules:
    """Reads the modules of an encoder with states of ``hidden_size`` features.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: our embedding head cannot represent the modules.
    """
    model = _of_model(store)
    if (kind := model.get("model_type", _MODEL_TYPE)) != _MODEL_TYPE:
        raise _refusal(store / SENTENCE_MODEL, f"model_type must be {_MODEL_TYPE!r}; got {kind!r:.80}")
    paths = _paths(store)
    if SENTENCE_TRANSFORMER in store.names():
        fields = read_json(store, SENTENCE_TRANSFORMER)
        _expect(store / SENTENCE_TRANSFORMER, fields, _OF_TRANSFORMER, open_fields=_OF_TEXTS)
    settings: dict[str, Any] = {"embedding_pooling": _pooling(store / paths["Pooling"], hidden_size)}
    if (dense := paths.get("Dense")) is not None:
        settings["embedding_size"] = _embedding_size(store / dense, hidden_size)
    if (norm := paths.get("Normalize")) is not None and _CONFIG in (store / norm).names():
        _expect(store / norm / _CONFIG, read_json(store / norm, _CONFIG), _NAMES)
    settings["normalize_embeddings"] = norm is not None
    return SentenceModules(settings, dense, _notes(store, model, is_normalized=norm is not None))


def _paths(store: Store) -> dict[str, str]:
    """Returns the folder of each module, by the name of its class."""
    path, entries = store / MODULES, read_json_list(store, MODULES)
    paths: dict[str, str] = {}
    for entry in entries[:_MOST_MODULES]:
        given = entry if isinstance(entry, dict) else {}
        kind, folder = given.get("type"), given.get("path")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise _refusal(path, f"each module must have a type and a path; got {entry!r:.80}")
        package, _, name = kind.rpartition(".")
        is_known = package.split(".")[0] == "sentence_transformers" and name not in paths
        paths[name if is_known else kind] = folder  # code of its own, or a second one, is in no accepted sequence
    if tuple(paths) not in _SEQUENCES or len(entries) > len(paths):
        wanted = "Transformer, Pooling, at most one Dense, at most one Normalize"
        raise _refusal(path, f"the modules must be {wanted}, all of sentence_transformers; got {', '.join(paths):.200}")
    for name, folder in paths.items():
        # an untrusted file must not reach outside its folder
        is_inside = Path(folder).name == folder != ".." and folder.isprintable()
        if not is_inside or (folder == "") != (name == "Transformer"):
            wanted = "Transformer must have the path '', and others that of a folder inside"
            raise _refusal(path, f"{wanted}; {name} has {folder!r:.80}")
    return paths


def _pooling(folder: Store, hidden_size: int) -> str:
    """Returns ``embedding_pooling`` of the Pooling module in ``folder``."""
    path, fields = folder / _CONFIG, read_json(folder, _CONFIG)
    old = [name for name in fields if name.startswith(f"{_MODE}_")]
    modes = fields.get(_MODE, [_OLD_MODES.get(name, name) for name in old if fields[name]] if old else "mean")
    if isinstance(modes, list) and len(modes) == 1:
        modes = modes[0]
    if not isinstance(modes, str) or modes not in _POOLINGS:
        raise _refusal(path, f"{_MODE} must be {' or '.join(_POOLINGS)}; got {modes!r:.200}")
    sizes = dict.fromkeys(("word_embedding_dimension", "embedding_dimension"), (hidden_size,))
    # without a prompt it would make no difference, but the models that have it are trained with prompts
    _expect(path, fields, {**sizes, "include_prompt": (True,)}, open_fields=(_MODE, *old))
    return _POOLINGS[modes]


def _embedding_size(folder: Store, hidden_size: int) -> int:
    """Returns ``embedding_size`` of the Dense module in ``folder``."""
    path, fields = folder / _CONFIG, read_json(folder, _CONFIG)
    fields = {"activation_function": "torch.nn.modules.activation.Tanh", **fields}  # their default
    allowed = {
        "in_features": (hidden_size,),
        "bias": (True,),
        "activation_function": _IDENTITIES,
        "use_residual": (False,),
        **_NAMES,
    }
    _expect(path, fields, allowed, open_fields=("out_features",))
    size = fields.get("out_features")
    if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
        raise _refusal(path, f"out_features must be a positive integer; got {size!r:.80}")
    return size


def _notes(store: Store, model: Mapping[str, Any], *, is_normalized: bool) -> tuple[str, ...]:
    notes, similarity = [], model.get(SIMILARITY) or "cosine"
    if not is_normalized and similarity != "dot":
        notes.append(
            f"{store} compares embeddings by their {similarity!r:.40} similarity but does not normalize them, and "
            "Megalith compares such embeddings by dot products; set model.bert.normalize_embeddings=true to train on "
            "cosines"
        )
    prompts = model.get(PROMPTS)
    if isinstance(prompts, dict) and (told := {name: text for name, text in prompts.items() if text}):
        notes.append(
            f"{store} has prompts for texts, {told!r:.200}, which Megalith does not add; write them in front of the "
            "texts of your data if you want them"
        )
    if _of_transformer(store).get(LOWERCASE):
        notes.append(
            f"{store} is for lowercased texts ({LOWERCASE}); if its tokenizer does not lowercase them itself, do so in "
            "your data"
        )
    return tuple(notes)


def _of_model(store: Store) -> dict[str, Any]:
    return read_json(store, SENTENCE_MODEL) if SENTENCE_MODEL in store.names() else {}


def _of_transformer(store: Store) -> dict[str, Any]:
    return read_json(store, SENTENCE_TRANSFORMER) if SENTENCE_TRANSFORMER in store.names() else {}


def _expect(
    path: Store, fields: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], open_fields: Sequence[str] = ()
) -> None:
    """Raises ConfigError unless each of ``fields`` has one of its ``allowed`` values or is one of ``open_fields``."""
    for name, value in fields.items():
        if name in open_fields or value in allowed.get(name, ()):
            continue
        if name not in allowed:
            raise _refusal(path, f"{name:.80} ({value!r:.80}) is a field that Megalith does not know")
        raise _refusal(path, f"{name} must be {' or '.join(map(repr, allowed[name]))}; got {value!r:.80}")


def _refusal(path: Store, violation: str) -> ConfigError:
    return ConfigError(
        f"{path} describes embeddings that Megalith's embedding head cannot compute: {violation}; to start from the "
        f"encoder without what follows it, remove {MODULES} from the folder and set model.bert.embedding_pooling, "
        "embedding_size and normalize_embeddings yourself"
    )
