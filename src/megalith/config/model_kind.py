"""The kinds of model, which groups of settings decide: with model.bert it is a BERT, without one a GPT."""

from typing import Literal

__all__ = ["ModelKind"]

ModelKind = Literal["gpt", "bert"]
