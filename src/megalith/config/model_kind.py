"""The kinds of model, which groups of settings decide: model.bert a BERT, model.t5 a T5, and neither a GPT."""

from typing import Literal

__all__ = ["ModelKind"]

ModelKind = Literal["gpt", "bert", "t5"]
