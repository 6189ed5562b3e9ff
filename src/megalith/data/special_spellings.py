"""Keeps text that spells a special token from being encoded as that token.

The library finds special tokens in a text before its model sees the rest, and leaves that out when told to
(``encode_special_tokens``). The model may still know the spelling: SentencePiece's Unigram files, such as T5's, list
``</s>`` and ``<extra_id_0>`` among their pieces with the best score of all, and a vocabulary of whole words may too.
"""

import json
from typing import Any

import tokenizers

__all__ = ["model_without", "special_pieces"]

_NEVER_IN_TEXT = "\U0010ffff"  # a code point that Unicode assigns to no character, now or later


def special_pieces(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """The ids of the special tokens that are also entries of the model, without that for unknown words."""
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    unknown = getattr(tokenizer.model, "unk_token", None)
    return {text: id for id, text in special.items() if pieces.get(text) == id and text != unknown}


def model_without(content: bytes, special: frozenset[str]) -> Any:
    """The model of the tokenizer.json ``content``, with the same ids, but no text is encoded as any of ``special``."""
    tree: dict[str, Any] = json.loads(content)
    model = tree["model"]

    def renamed(piece: str) -> str:
        return _NEVER_IN_TEXT + piece if piece in special else piece

    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed(piece): id for piece, id in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed(piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if special.isdisjoint((*pair, "".join(pair)))]
    return tokenizers.Tokenizer.from_str(json.dumps({"version": tree["version"], "model": model})).model
