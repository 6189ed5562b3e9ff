"""Activation recomputation, applied to modules from outside: what is not saved is recomputed in backward.

    recompute_modules_   saves the inputs of a module and nothing inside it, for modules that save much inside
    discard_outputs_     does not save the output of an operation that saves nothing else (a norm, an activation); it
                         is recomputed from the inputs, which the operation's own gradient needs anyway

Dropout masks are functions of global indices, so there is no generator state to save and restore. Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalith.fusions.core.dispatch import Backend, chosen_by_use, use

__all__ = ["DiscardableOutput", "discard_outputs_", "recompute", "recompute_modules_"]


def recompute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Returns ``function(*args)``; its activations are dropped and recomputed in backward."""
    if not torch.is_grad_enabled():
        return function(*args)
    if not torch.compiler.is_compiling():  # it traces forward and recomputation into one graph, and cannot trace `use`
        function = partial(_preferring, chosen_by_use(), function)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def _preferring(backend: Backend | None, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Runs ``function(*args)`` on the forward's paths, as backward may run in another thread or outside ``use``."""
    with use(backend):
        return function(*args)


def recompute_modules_(modules: Iterable[nn.Module]) -> None:
    """Makes each of ``modules`` run under ``recompute``; names, state and hooks are unchanged."""
    for module in modules:
        # the instance's forward shadows that of its class; hooks (FSDP2's all-gathers) still run around it
        module.forward = partial(recompute, module.forward)


class DiscardableOutput(nn.Module):
    """A point in a layer whose output can be discarded after its last use in forward; it has no tensors.

    It just calls the given function, unless ``discard_outputs_`` has been called with the layer and this module.

    Args:
        operation: the name by which users select it.
    """

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.layer_run: _LayerRun | None = None

    def forward(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Returns ``function(*inputs)``, which must be bitwise reproducible, in new memory or as a view of an input."""
        return self.computed(function(*inputs), function, *inputs)

    def computed(self, output: Tensor, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Returns ``output``, already computed elsewhere, which ``function(*inputs)`` can recompute."""
        if self.layer_run is not None:
            self.layer_run.add(output, function, inputs)
        return output

    def extra_repr(self) -> str:
        return self.operation


def discard_outputs_(layer: nn.Module, outputs: Collection[DiscardableOutput]) -> None:
    """Makes ``layer`` not save any of ``outputs``, modules inside it, for backward, whichever operations use them.

    If a function to be recomputed in backward communicates with other ranks, these must discard the same outputs.
    """
    run = _LayerRun()
    for output in outputs:
        output.layer_run = run
    layer.forward = partial(run, layer.forward)


class _Recipe:
    """Recomputes an output, once per backward pass for all operations that saved it."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self._function, self._inputs = partial(_preferring, chosen_by_use(), function), inputs
        self._num_missing = 0
        self._made: Tensor | None = None
        self.num_saved = 0

    def make(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._function(*(_unpack(x) for x in self._inputs))
            self._num_missing = self.num_saved
        made = self._made
        self._num_missing -= 1
        if self._num_missing == 0:
            self._made = None
        return made


class _Discarded(NamedTuple):
    """What is saved in place of an output, or of a view of it."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _LayerRun:
    """Runs a layer's forward, and replaces saved outputs that have a recipe."""

    def __init__(self) -> None:
        # by storage; holds the output so that no other tensor can reuse its memory before the layer ends
        self._recipes: dict[int, tuple[Tensor, _Recipe]] | None = None

    def __call__(self, forward: Callable[..., Tensor], *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args)
        self._recipes = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                return forward(*args)
        finally:
            self._recipes = None

    def add(self, output: Tensor, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        if self._recipes is None:  # evaluation, or a part of the layer that is recomputed in backward
            return
        packed = tuple(self._pack(x) if isinstance(x, Tensor) else x for x in inputs)
        self._recipes[_memory(output)] = output, _Recipe(function, packed)

    def _pack(self, x: Tensor) -> Tensor | _Discarded:
        assert self._recipes is not None, "the layer runs"
        output, recipe = self._recipes.get(_memory(x), (None, None))
        if recipe is None or output is None or x.dtype != output.dtype:
            return x.detach()  # x could reference the node that saves it, a cycle that is never freed
        recipe.num_saved += 1
        return _Discarded(recipe, x.size(), x.stride(), int(x.storage_offset()))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _unpack(x: Any) -> Any:
    if not isinstance(x, _Discarded):
        return x
    return x.recipe.make().as_strided(x.size, x.stride, x.offset)
