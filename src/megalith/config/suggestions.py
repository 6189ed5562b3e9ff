"""All that is wrong with a run's settings, and for each violation a way out that has been tried and found valid."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megalith.config.draft import Fix, Violation
from megalith.config.field_errors import field_violations
from megalith.config.rules import broken
from megalith.config.settings_tree import FIELDS, applied, draft_of, plain_tree
from megalith.config.yaml_text import write_override

__all__ = ["Advice", "advise", "violations"]

_TRIES = 400  # fixes tried for one violation; a try takes about 0.2 ms


@dataclass(frozen=True)
class Advice:
    """A violation in words, and settings that mend it and break nothing else. None: no small change does."""

    message: str
    fix: Fix | None

    def __str__(self) -> str:
        if self.fix is None:
            return self.message
        return f"{self.message}{' ' if self.message.endswith('?') else '; '}{_spelled(self.fix)}"


def violations(tree: Mapping[str, Any], world_size: int | None = None) -> list[str]:
    """One line for each violation in a tree of settings, with a valid suggestion; none if ``load_run`` would take it.

    Args:
        tree: groups of settings by name, as read from YAML.
        world_size: ranks of the run; without it, rules that depend on it are not held.
    """
    return [str(advice) for advice in advise(tree, world_size)]


def advise(tree: Mapping[str, Any], world_size: int | None = None) -> list[Advice]:
    """``violations`` with each suggestion as settings to change."""
    tree = plain_tree(tree)
    found = _examine(tree, world_size)
    standing = frozenset(violation.key for violation in found)
    return [Advice(violation.message, _way_out(tree, world_size, violation, standing)) for violation in found]


def _examine(tree: Mapping[str, Any], world_size: int | None) -> list[Violation]:
    found, malformed = field_violations(tree)
    return found + broken(draft_of(tree, malformed, world_size))


def _way_out(
    tree: Mapping[str, Any], world_size: int | None, violation: Violation, standing: Collection[tuple[str, str]]
) -> Fix | None:
    """The first fix after which ``violation`` is gone and nothing is wrong that was not; None if there is none.

    A fix may need a second one (half the ranks to share a batch, then another batch), so pairs are tried last.
    """
    halfway: list[tuple[Fix, Violation]] = []
    for fix in islice(violation.fixes, _TRIES):
        after = _examine(applied(tree, fix), world_size)
        new = [other for other in after if other.key not in standing]
        if any(other.key == violation.key for other in after):
            continue
        if not new:
            return fix
        halfway.append((fix, new[0]))
    for fix, new_violation in halfway[: _TRIES // 20]:
        for more in islice(new_violation.fixes, _TRIES // 20):
            both = {**fix, **more}
            after = _examine(applied(tree, both), world_size)
            if all(other.key in standing and other.key != violation.key for other in after):
                return both
    return None


def _spelled(fix: Fix) -> str:
    """``fix`` in words that can be typed; what is no setting can only be removed."""
    changes = [write_override(name, value) for name, value in fix.items() if name in FIELDS]
    removed = [name for name in fix if name not in FIELDS]
    parts = [f"use {', '.join(changes)}"] if changes else []
    return " and ".join([*parts, f"remove {', '.join(removed)}"] if removed else parts)
