"""Folders of embedding models as sentence-transformers writes them, in its versions before and after 5.4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    MegatronBertConfig,
    MegatronBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    RoFormerConfig,
    RoFormerModel,
)

from tests.models.hf import peers
from tests.models.hf.test_bert import SHAPE

__all__ = ["KINDS", "change", "encoder", "their_embeddings", "write_sentence_model"]

_SHAPE = {**SHAPE, "initializer_range": 0.3}
KINDS = {
    "bert": (BertModel, BertConfig),
    "roberta": (RobertaModel, RobertaConfig),
    "roformer": (RoFormerModel, RoFormerConfig),
    "megatron-bert": (MegatronBertModel, MegatronBertConfig),
}
_PACKAGES = {
    "old": dict.fromkeys(("Transformer", "Pooling", "Dense", "Normalize"), "sentence_transformers.models"),
    "new": {
        "Transformer": "sentence_transformers.base.modules.transformer",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling",
        "Dense": "sentence_transformers.base.modules.dense",
        "Normalize": "sentence_transformers.base.modules.normalize",
    },
}
_NAMES = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


def encoder(kind: str, **fields: Any) -> PreTrainedModel:
    """One of their headless encoders, with the pooler that it has by default."""
    torch.manual_seed(0)
    model, config = KINDS[kind]
    return peers.randomized(model(config(**_SHAPE | fields, architectures=[model.__name__]))).eval()


def write_sentence_model(
    folder: Path, kind: str = "bert", version: str = "old", *, pooling: str = "mean", size: int | None = None,
    normalize: bool = True, **fields: Any,
) -> PreTrainedModel:  # fmt: skip
    """Writes a model to ``folder``, with a projection to ``size`` features; returns its encoder."""
    theirs = encoder(kind, **fields)
    theirs.save_pretrained(folder)
    H, paths = theirs.config.hidden_size, {"Transformer": "", "Pooling": "1_Pooling"}
    if version == "old":
        modes = {f"pooling_mode_{mode}_tokens": mode == pooling for mode in ("mean", "max", "mean_sqrt_len")}
        pooled = {"word_embedding_dimension": H, "pooling_mode_cls_token": pooling == "cls", **modes}
    else:
        pooled = {"embedding_dimension": H, "pooling_mode": pooling, "include_prompt": True}
    files: dict[str, Any] = {"1_Pooling/config.json": pooled}
    if size is not None:
        paths["Dense"] = "2_Dense"
        names = _NAMES if version == "new" else {}
        identity = "torch.nn.modules.linear.Identity"
        sizes = {"in_features": H, "out_features": size, "bias": True, "activation_function": identity}
        files["2_Dense/config.json"] = sizes | names
    if normalize:
        paths["Normalize"] = f"{len(paths)}_Normalize"
        if version == "new":
            files[f"{paths['Normalize']}/config.json"] = _NAMES
    packages = _PACKAGES[version]
    files["modules.json"] = [
        {"idx": i, "name": str(i), "path": path, "type": f"{packages[name]}.{name}"}
        for i, (name, path) in enumerate(paths.items())
    ]
    of_model: dict[str, Any] = {"__version__": {"sentence_transformers": "2.0.0"}}
    of_texts: dict[str, Any] = {"max_seq_length": 16, "do_lower_case": False}
    if version == "new":
        of_model |= {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine", "prompts": {"query": ""}}
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        of_texts = {"transformer_task": "feature-extraction", "modality_config": {"text": text}}
        of_texts["module_output_name"] = "token_embeddings"
    files |= {"config_sentence_transformers.json": of_model, "sentence_bert_config.json": of_texts}
    for name, tree in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(tree))
    if size is not None:
        generator = torch.Generator().manual_seed(2)
        dense = {"linear.weight": torch.randn(size, H, generator=generator), "linear.bias": torch.arange(float(size))}
        save_file(dense, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    return theirs


def their_embeddings(
    hidden: Tensor, mask: Tensor, folder: Path, pooling: str, size: int | None, normalize: bool
) -> Tensor:
    """Embeddings [B, D] of padded texts from hidden states [B, S, H], as their modules compute them."""
    from safetensors.torch import load_file

    weights = mask.to(hidden.dtype).unsqueeze(-1)
    embeddings = hidden[:, 0] if pooling == "cls" else (hidden * weights).sum(1) / weights.sum(1)
    if size is not None:
        dense = load_file(folder / "2_Dense" / "model.safetensors")
        embeddings = torch.nn.functional.linear(embeddings, dense["linear.weight"], dense["linear.bias"])
    return torch.nn.functional.normalize(embeddings, p=2, dim=-1) if normalize else embeddings


def change(folder: Path, name: str, **fields: Any) -> None:
    """Sets fields of a JSON object in ``folder``, or removes those that are None."""
    path = folder / name
    tree = (json.loads(path.read_text()) if path.exists() else {}) | fields
    path.write_text(json.dumps({name: value for name, value in tree.items() if value is not None}))
