"""The names of a classifier's classes, as its data's identity keeps them in checkpoints and as messages list them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["class_names", "identity_of_classes", "listed"]

_FIELD = "classes"
_MOST_TOLD = 10


def identity_of_classes(names: Sequence[str]) -> dict[str, str]:
    """Returns ``names`` as a plain value; an identity has no lists."""
    return {_FIELD: json.dumps(names, ensure_ascii=False)}


def class_names(identity: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the class names in ``identity``, in order; empty if it has none, or in another format."""
    try:
        names = json.loads(identity.get(_FIELD, ""))
    except (TypeError, ValueError, RecursionError):  # a custom task may use the name for something else
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def listed(names: Sequence[str]) -> str:
    """Returns the first ten names for a message, and how many more there are; names with commas are quoted."""
    more = f" and {len(names) - _MOST_TOLD:,} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(repr(name) if "," in name else name for name in names[:_MOST_TOLD]) + more
