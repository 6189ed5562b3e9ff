"""All errors in a run's settings, each with a suggested fix that has been tried and found valid."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megalith.config.draft import Fix, Violation
from megalith.config.field_errors import field_violations
from megalith.config.rules import broken
from megalith.config.settings_tree import FIELDS, applied, draft_of, plain_tree
from megalith.config.yaml_text import write_override

__all__ = ["Advice", "advise", "violations"]

_MOST_ADVISED = 40  # each fix is tried on all settings, so the time grows quadratically with the errors
_LONGEST_FIX = 400  # characters; nobody types a longer one
_TRIES = 400  # single fixes tried for one violation; a try takes about 1 ms
_STARTS = 5  # how many fixes that lead to other violations are followed
_FURTHER = 4  # and how many more fixes are added to each


@dataclass(frozen=True)
class Advice:
    """The message of a violation, and settings that fix it and break nothing else; None if no small change does."""

    message: str
    fix: Fix | None

    def __str__(self) -> str:
        spelled = "" if self.fix is None else _spelled(self.fix)
        if not spelled or len(spelled) > _LONGEST_FIX:
            return self.message
        return f"{self.message}{' ' if self.message.endswith('?') else '; '}{spelled}"


def violations(tree: Mapping[str, Any], world_size: int | None = None) -> list[str]:
    """Returns a line for each violation in a tree of settings, with a valid suggestion; none if the tree is valid.

    Args:
        tree: groups of settings by name, as read from YAML.
        world_size: ranks of the run; without it, rules that depend on it are not checked.
    """
    return [str(advice) for advice in advise(tree, world_size)]


def advise(tree: Mapping[str, Any], world_size: int | None = None) -> list[Advice]:
    """Like ``violations``, with each suggestion as a mapping of settings to change."""
    tree = plain_tree(tree)
    found = _examine(tree, world_size)
    if len(found) > _MOST_ADVISED:
        return [Advice(violation.message, None) for violation in found]
    standing = frozenset(violation.key for violation in found)
    return [Advice(violation.message, _way_out(tree, world_size, violation, standing)) for violation in found]


def _examine(tree: Mapping[str, Any], world_size: int | None) -> list[Violation]:
    found, malformed = field_violations(tree)
    return found + broken(draft_of(tree, malformed, world_size))


def _way_out(
    tree: Mapping[str, Any], world_size: int | None, violation: Violation, standing: Collection[tuple[str, str]]
) -> Fix | None:
    """Returns the first fix that removes ``violation`` and causes no new one; None if none is found.

    A fix may need others after it (half the ranks to share a batch, then another batch size); those are tried last.
    """

    def left_after(fix: Fix) -> list[Violation]:
        after = _examine(applied(tree, fix), world_size)
        return [other for other in after if other.key == violation.key or other.key not in standing]

    def mending(wrong: Violation, fixes: Iterable[Fix]) -> Iterator[tuple[list[Violation], Fix]]:
        for fix in fixes:
            left = left_after(fix)
            if wrong.key not in [other.key for other in left]:
                yield left, fix

    halfway: list[tuple[list[Violation], Fix]] = []
    for left, fix in mending(violation, islice(violation.fixes, _TRIES)):
        if not left:
            return fix
        halfway.append((left, fix))
    for left, fix in sorted(halfway, key=_num_left)[:_STARTS]:
        for _ in range(_FURTHER):
            further = [{**fix, **more} for more in islice(left[0].fixes, _TRIES // _STARTS)]
            left, fix = min(mending(left[0], further), key=_num_left, default=(left, fix))
            if not left:
                return fix
    return None


def _num_left(outcome: tuple[list[Violation], Fix]) -> int:
    return len(outcome[0])


def _spelled(fix: Fix) -> str:
    """Returns ``fix`` as text that can be typed; what is not a setting can only be removed."""
    changes = [write_override(name, value) for name, value in fix.items() if name in FIELDS]
    removed = [name for name in fix if name not in FIELDS]
    parts = [f"use {', '.join(changes)}"] if changes else []
    return " and ".join([*parts, f"remove {', '.join(removed)}"] if removed else parts)
