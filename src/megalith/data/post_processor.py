"""The post-processor of a tokenizer.json: which tokens it prepends to a text.

The JSON is parsed and the post-processor is not run, because the library panics on a damaged one.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["put_in_front", "without_beginning"]


def put_in_front(processor: dict[str, Any]) -> list[Any]:
    """The ids that ``processor`` prepends to a text; empty if it also appends some, as BERT's does."""
    return [id for template in _templates(processor) for id in _ids_in_front(template)]


def without_beginning(content: bytes) -> bytes:
    """The tokenizer.json ``content`` with a post-processor that prepends nothing to a text."""
    tree = json.loads(content)
    for template in _templates(tree["post_processor"] or {}):
        names = set(_names_in_front(template))
        for form in ("single", "pair"):
            template[form] = [
                piece for piece in template[form] if "Sequence" in piece or piece["SpecialToken"]["id"] not in names
            ]
    return json.dumps(tree, ensure_ascii=False).encode()


def _templates(processor: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates in ``processor``, in the order of their tokens in a text."""
    if processor.get("type") == "Sequence":
        for inner in reversed(processor["processors"]):  # each processes the output of the previous one
            yield from _templates(inner)
    if processor.get("type") == "TemplateProcessing":  # other types: byte offsets, or BERT's and RoBERTa's tokens
        yield processor


def _names_in_front(template: Mapping[str, Any]) -> list[Any]:
    *in_front, last = template["single"] or [{}]
    if "Sequence" not in last or any("SpecialToken" not in piece for piece in in_front):
        return []
    return [piece["SpecialToken"]["id"] for piece in in_front]


def _ids_in_front(template: Mapping[str, Any]) -> list[Any]:
    known = template["special_tokens"]
    return [id for name in _names_in_front(template) for id in (known[name]["ids"] if name in known else [None])]
