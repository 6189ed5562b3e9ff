"""The names of the classes that a classifier was trained on, as the identity of its data keeps them in checkpoints."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["class_names", "identity_of_classes"]

_FIELD = "classes"


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
