"""torch.nn.Module: what a forward calls and reads.

Module._forward_hooks, _forward_pre_hooks   private; hooks that run when a module is called
Module._modules, _parameters, _buffers      private; the contents of a module, as dicts
"""

import operator
from collections.abc import Sequence

from torch import nn

__all__ = [
    "ForwardParts",
    "has_forward_hooks",
]


def has_forward_hooks(model: nn.Module) -> bool:
    """Returns whether a forward of ``model`` also calls hooks, either of one of its modules or global ones."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ForwardParts:
    """A snapshot of what a forward through ``modules`` uses: submodules, parameters, buffers and hooks.

    It holds references, so that no part can be freed and its id reused.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # torch changes these dicts in place; they are looked up once because the check runs for every token
        self._parts = [parts for x in modules for parts in (x._modules, x._parameters, x._buffers)]
        self._hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]
        self._hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self._own = [vars(x) for x in modules]  # an instance attribute may shadow the class's method
        self._held = self._found()

    def are_in_place(self) -> bool:
        """Returns whether all parts are still the same objects."""
        found = self._found()
        return len(found) == len(self._held) and all(map(operator.is_, found, self._held))

    def _found(self) -> list[object]:
        found: list[object] = [part for parts in self._parts for part in parts.values()]
        found += [own["forward"] for own in self._own if "forward" in own]
        if any(self._hooks):
            found += [hook for hooks in self._hooks for hook in hooks.values()]
        return found
