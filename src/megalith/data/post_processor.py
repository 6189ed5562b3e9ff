"""The post-processor of a tokenizer.json: which tokens it puts around a text.

The JSON is parsed and the post-processor is not run, because the library panics on a damaged one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["frame_of", "without_beginning"]


def frame_of(processor: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The ids that ``processor`` puts before and after a text; a damaged one may contain other values than ids."""
    match processor.get("type"):
        case "Sequence":  # each processes the output of the previous one
            frames = [frame_of(inner) for inner in processor["processors"]]
            return [id for before, _ in reversed(frames) for id in before], [id for _, after in frames for id in after]
        case "BertProcessing" | "RobertaProcessing":
            return [processor["cls"][1]], [processor["sep"][1]]
        case "TemplateProcessing":
            single = processor["single"]
            place = next((number for number, piece in enumerate(single) if "Sequence" in piece), 0)
            return _ids(processor, single[:place]), _ids(processor, single[place:])
    return [], []


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
    if processor.get("type") == "Sequence":
        for inner in processor["processors"]:
            yield from _templates(inner)
    if processor.get("type") == "TemplateProcessing":  # other types: byte offsets, or BERT's and RoBERTa's tokens
        yield processor


def _names_in_front(template: Mapping[str, Any]) -> list[Any]:
    *in_front, last = template["single"] or [{}]
    if "Sequence" not in last or any("SpecialToken" not in piece for piece in in_front):
        return []
    return [piece["SpecialToken"]["id"] for piece in in_front]


def _ids(template: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> list[Any]:
    known = template["special_tokens"]
    names = [piece["SpecialToken"]["id"] for piece in pieces if "Sequence" not in piece]
    return [id for name in names for id in (known[name]["ids"] if name in known else [None])]
