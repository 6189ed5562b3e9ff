"""The kinds of model: a BERT if model.bert is set, a T5 if model.t5 is set, otherwise a GPT."""

from typing import Literal

__all__ = ["ModelKind"]

ModelKind = Literal["gpt", "bert", "t5"]
