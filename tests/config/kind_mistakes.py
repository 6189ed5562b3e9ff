"""Mistakes in what goes with which kind of model."""

from typing import Any

from tests.config.mistake import Mistake

__all__ = ["KIND_MISTAKES"]

BERT: dict[str, Any] = {"model.bert.num_token_types": 2}

KIND_MISTAKES = [
    Mistake({"model.bert.binary_head": False}, r"model.bert.num_token_types is missing; use .*num_token_types=2"),
    Mistake(
        {**BERT, "model.mtp.num_modules": 1},
        r"model.mtp has no place beside model.bert: .* an encoder sees them; remove model.mtp",
    ),
    Mistake(
        {**BERT, "model.moe.num_experts": 4}, r"model.moe has no place beside model.bert: .*padding.*; remove model.moe"
    ),
    Mistake(
        {**BERT, "train.generation.every": 4, "train.generation.prompts": ["a"]},
        r"train.generation has no place beside model.bert: an encoder writes no text; remove train.generation",
    ),
    Mistake(
        {**BERT, "model.bert.head": "classification"},
        r"model.bert.num_classes is missing: .*number of classes; use model.bert.num_classes=2",
    ),
    Mistake(
        {**BERT, "model.bert.position_offset": 2},
        r"position_offset \(2\) has no effect with model.position_embedding_type=rope, .*; use .*position_offset=null",
    ),
    Mistake(
        {**BERT, "model.bert.num_classes": 3},
        r"model.bert.num_classes \(3\) has no effect with model.bert.head=pretraining, only with .*=classification",
    ),
    Mistake(
        {**BERT, "model.bert.head": "multiple_choice", "model.bert.binary_head": True},
        r"model.bert.binary_head \(True\) has no effect with model.bert.head=multiple_choice, only",
    ),
]
