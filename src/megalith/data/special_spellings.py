"""Keeps text that spells a special token from being encoded as that token.

The library finds special tokens in a text before its model sees the rest, and leaves that out when told to
(``encode_special_tokens``). The model may still know the spelling: SentencePiece's Unigram files, such as T5's, list
``</s>`` and ``<extra_id_0>`` among their pieces with the best score of all, and a vocabulary of whole words may too.
Whether a text leads the model to such a piece depends on merges, scores and what surrounds it, so none is left to it.
"""

import json
import secrets
from typing import Any

import tokenizers

__all__ = ["model_without", "special_pieces"]


def special_pieces(tokenizer: tokenizers.Tokenizer) -> frozenset[str]:
    """The special tokens that the model lists among its pieces, except for the one for unknown words."""
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    unknown = getattr(tokenizer.model, "unk_token", None)  # Unigram has its number instead
    special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return frozenset(text for id, text in special.items() if pieces.get(text) == id and text != unknown)


def model_without(content: bytes, special: frozenset[str]) -> Any:
    """The model of the tokenizer.json ``content``, with the same ids, but no text is encoded as any of ``special``."""
    tree: dict[str, Any] = json.loads(content)
    model = tree["model"]
    hidden = secrets.token_hex(16)  # no document contains it

    def renamed(piece: str) -> str:
        return hidden + piece if piece in special else piece

    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed(piece): id for piece, id in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed(piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in _merges(model) if special.isdisjoint((*pair, _merged(model, *pair)))]
    return tokenizers.Tokenizer.from_str(json.dumps({"model": model})).model


def _merges(model: dict[str, Any]) -> list[list[str]]:
    """The pairs of a BPE model; older files have lines of text, of which the first may be a version."""
    lines = (each for each in model["merges"] if not (isinstance(each, str) and each.startswith("#version")))
    return [line.split(" ", 1) if isinstance(line, str) else line for line in lines]


def _merged(model: dict[str, Any], first: str, second: str) -> str:
    return first + second[len(model.get("continuing_subword_prefix") or "") :]
