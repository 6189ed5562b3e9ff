"""The post-processor of a tokenizer.json: which tokens it puts in front of a text.

It is read as its file has it, and not run: on a damaged one the library panics.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["put_in_front", "without_beginning"]


def put_in_front(processor: dict[str, Any]) -> list[Any]:
    """The ids that ``processor`` puts in front of one text; none if it also puts some behind it, as BERT's does."""
    return [id for template in _templates(processor) for id in _ids_in_front(template)]


def without_beginning(content: bytes) -> bytes:
    """The tokenizer.json ``content`` with a post-processor that puts nothing in front of a text."""
    tree = json.loads(content)
    for template in _templates(tree["post_processor"] or {}):
        names = set(_names_in_front(template))
        for form in ("single", "pair"):
            template[form] = [
                piece for piece in template[form] if "Sequence" in piece or piece["SpecialToken"]["id"] not in names
            ]
    return json.dumps(tree, ensure_ascii=False).encode()


def _templates(processor: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates in ``processor``, the one whose tokens come first in a text first."""
    if processor.get("type") == "Sequence":
        for inner in reversed(processor["processors"]):  # each works on what the one before has made
            yield from _templates(inner)
    if processor.get("type") == "TemplateProcessing":  # others have bytes' offsets, or BERT's and RoBERTa's frames
        yield processor


def _names_in_front(template: Mapping[str, Any]) -> list[Any]:
    *in_front, last = template["single"] or [{}]
    if "Sequence" not in last or any("SpecialToken" not in piece for piece in in_front):
        return []
    return [piece["SpecialToken"]["id"] for piece in in_front]


def _ids_in_front(template: Mapping[str, Any]) -> list[Any]:
    known = template["special_tokens"]
    return [id for name in _names_in_front(template) for id in (known[name]["ids"] if name in known else [None])]
