"""The files of sentence-transformers beside an exported encoder, which ``sentence_modules.py`` reads."""

import json
from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.data.companions import sentence_companions
from megalith.models.hf.sentence_modules import DENSE, MODULES

__all__ = ["module_files"]

# the package that every version of sentence-transformers resolves, though the classes have moved
_PACKAGE = "sentence_transformers.models"
_POOLINGS = {"first": "cls_token", "mean": "mean_tokens"}
_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")


def module_files(config: TransformerConfig, num_positions: int, kept: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the content of the files by name, such as ``1_Pooling/config.json``, without tensors.

    Args:
        config: a model with the embedding head.
        num_positions: the rows of its learned position table, or else the length it was trained on, in tokens.
        kept: ``read_companions`` of the folder that the model comes from.
    """
    bert, H = config.bert, config.hidden_size
    assert bert is not None, "only encoders embed"
    paths = ["", "1_Pooling"]
    modes = {f"pooling_mode_{mode}": mode == _POOLINGS[bert.embedding_pooling] for mode in _MODES}
    files: dict[str, Any] = {"1_Pooling/config.json": {"word_embedding_dimension": H, **modes}}
    if bert.embedding_size is not None:
        paths.append(DENSE)
        files[f"{DENSE}/config.json"] = {
            "in_features": H,
            "out_features": bert.embedding_size,
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
    if bert.normalize_embeddings:
        paths.append(f"{len(paths)}_Normalize")
        files[f"{paths[-1]}/config.json"] = {}
    files[MODULES] = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_PACKAGE}.{path.partition('_')[2] or 'Transformer'}"}
        for i, path in enumerate(paths)
    ]
    written = {name: (json.dumps(tree, indent=2) + "\n").encode() for name, tree in files.items()}
    similarity = "cosine" if bert.normalize_embeddings else "dot"
    return written | sentence_companions(kept, num_positions, similarity)
