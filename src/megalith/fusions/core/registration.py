"""Registers a forward and a backward function as one differentiable torch operator.

Three kinds of functions, one registration. Compiled Triton launchers become a ``triton_op``: torch.compile sees their
kernels and plans memory around them. Interpreted ones become a ``custom_op``, which torch.compile takes as it is: the
interpreter reads data pointers, which the tensors of a trace do not have. So do functions over blocks of rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megalith.fusions.core.eager import eager_or_operator, recorded
from megalith.fusions.core.records import flat_signature
from megalith.optional import triton_interprets
from megalith.torch_compat import launching_directly

__all__ = ["Differentiable", "Operator", "gradients_like", "register_without_gradient", "wrap_triton"]

Y = TypeVar("Y")
G = TypeVar("G", bound=tuple[Tensor, ...])
Y_co = TypeVar("Y_co", covariant=True)
G_co = TypeVar("G_co", covariant=True, bound=tuple[Tensor, ...])
Saves = Callable[..., tuple[object, ...]]
Passes = Callable[..., Sequence[str]]
Shares = Callable[..., Mapping[str, str]]


class Differentiable(Protocol[Y_co, G_co]):
    """A function of positional operands that autograd sees through, and its gradient by itself."""

    def __call__(self, *inputs: Any) -> Y_co: ...

    @property
    def back(self) -> Callable[..., G_co]:
        """The registered backward; it records no gradient."""


@dataclass(frozen=True)
class Operator(Generic[Y, G]):
    """A differentiable operator as it is declared; each of its implementations is registered under a name of its own.

    Args:
        outputs: allocates what forward returns, from the same inputs: tensors, None, numbers, strings. Its annotations
            are the schema, those of a record's fields too (``core.records``), and it tells torch.compile the shapes.
        gradients: what ``outputs`` is to forward, it is to backward. Backward gets the gradients of the first
            ``num_differentiable`` outputs, then what ``saves`` gave, and, if ``gradients`` has an argument ``needs``, a
            list of bool: which of ``of`` are wanted. It returns a tensor for each of them, empty where none is wanted
            or the input was None.
        of: names of the inputs that have gradients, in the order that backward returns them.
        saves: picks what backward needs, from the tuple of outputs and the inputs; by default all inputs.
        passes: names, from the inputs, those whose gradient is that of the first output, as it is; backward, if it is
            called at all, is not asked for them.
        shares: from the inputs, those whose gradient is that of another, by names; backward is asked for the other,
            as an operator may not return one tensor twice.
        num_differentiable: outputs past these have no gradient: statistics that only backward reads.
        absent_as_none: backward takes None for the gradient of an output that nothing was computed from; else zeros.
    """

    outputs: Callable[..., Y]
    gradients: Callable[..., G]
    of: Sequence[str]
    saves: Saves | None = None
    passes: Passes = lambda *_: ()
    shares: Shares = lambda *_: {}
    num_differentiable: int = 1
    absent_as_none: bool = False

    def register(
        self, name: str, forward: Callable[..., Y], backward: Callable[..., G], *, opaque: bool = False
    ) -> Differentiable[Y, G]:
        """``megalith::<name>`` with its gradient ``megalith::<name>_back``, of functions that write fresh tensors only.

        The gradient has no gradient of its own: a second derivative raises instead of being wrong.

        Args:
            opaque: they are not made of Triton kernels.
        """
        operator, implementation = _define(name, forward, self.outputs, opaque)
        gradient = eager_or_operator(*_define(f"{name}_back", backward, self.gradients, opaque))
        input_names = list(flat_signature(self.outputs).parameters)
        positions = [input_names.index(of) for of in self.of]
        takes_needs = "needs" in flat_signature(self.gradients).parameters

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*outputs[self.num_differentiable :])
            ctx.set_materialize_grads(not self.absent_as_none)
            _save_for_backward(ctx, inputs if self.saves is None else self.saves(outputs, *inputs))
            ctx.passed = [input_names.index(name) for name in self.passes(*inputs)]
            ctx.shared = {input_names.index(name): input_names.index(of) for name, of in self.shares(*inputs).items()}

        def gradients(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            wanted = _wanted(ctx, positions)
            needs = [wanted] if takes_needs else []
            arguments = *dy[: self.num_differentiable], *_kept(ctx), *needs
            results = gradient(*arguments) if any(wanted) else [None] * len(positions)
            return _by_input(ctx, dict(zip(positions, results, strict=True)), dy[0])

        torch.library.register_autograd(f"megalith::{name}", gradients, setup_context=setup_context)
        differentiable = recorded(name, implementation, setup_context, gradients)
        call: Any = eager_or_operator(operator, implementation, differentiable)
        call.back = gradient
        registered: Differentiable[Y, G] = call
        return registered


def register_without_gradient(
    name: str,
    function: Callable[..., Y],
    outputs: Callable[..., Y],
    *,
    mutates: Sequence[str] = (),
    opaque: bool = False,
) -> Callable[..., Y]:
    """The operator ``megalith::<name>``, whose results nothing is differentiated through; the rest as in ``Operator``.

    Args:
        mutates: names of the inputs, tensors or lists of them, that ``function`` writes into; its own name ends in "_".
    """
    operator, implementation = _define(name, function, outputs, opaque, mutates)
    # autograd counts the writes of an operator, and not those of a kernel
    return operator if mutates else eager_or_operator(operator, implementation)


def gradients_like(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Fresh memory for the gradient of each of ``inputs``, contiguous, in its dtype; empty for None."""
    given = next(x for x in inputs if x is not None)
    return tuple(given.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def wrap_triton(kernel: Any) -> Any:
    """``kernel`` for an operator to launch. Call it by this bare name: torch's compile cache scans launchers for it."""
    return kernel if triton_interprets() else torch.library.wrap_triton(kernel)


def _save_for_backward(ctx: Any, kept: Sequence[Any]) -> None:
    ctx.save_for_backward(*(x for x in kept if isinstance(x, Tensor)))
    ctx.kept = [None if isinstance(x, Tensor) else (x,) for x in kept]  # None: the next of the saved tensors


def _kept(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if x is None else x[0] for x in ctx.kept]


def _wanted(ctx: Any, positions: Sequence[int]) -> list[bool]:
    """Which of the gradients at ``positions`` backward is asked for."""
    asked = {ctx.shared.get(position, position) for position in positions if ctx.needs_input_grad[position]}
    return [position in asked and position not in ctx.passed for position in positions]


def _by_input(ctx: Any, found: dict[int, Tensor | None], dy: Tensor) -> tuple[Tensor | None, ...]:
    """What backward ``found``, and what passes or is shared, for each input that needs a gradient."""
    found |= dict.fromkeys(ctx.passed, dy)
    found |= {position: found[of] for position, of in ctx.shared.items()}
    return tuple(found.get(position) if needed else None for position, needed in enumerate(ctx.needs_input_grad))


def _define(
    name: str, function: Callable[..., Y], outputs: Callable[..., Y], opaque: bool, mutates: Sequence[str] = ()
) -> tuple[Callable[..., Y], Callable[..., Y]]:
    """The operator, and what computes the same of tensors that nothing traces."""
    define: Any = torch.library.custom_op if opaque or triton_interprets() else torch.library.triton_op
    options: dict[str, Any] = {"mutates_args": tuple(mutates)}
    implementation = function
    if define is torch.library.custom_op:
        options["schema"] = torch.library.infer_schema(_declared_as(outputs, outputs), **options)
    else:
        function, implementation = _declared_as(function, outputs), _launching(function)
    operator: Callable[..., Y] = define(f"megalith::{name}", function, **options)
    torch.library.register_fake(f"megalith::{name}", outputs)
    return operator, implementation


def _launching(function: Callable[..., Y]) -> Callable[..., Y]:
    """``function``, whose kernels go to Triton and not through what torch.compile would trace."""

    def launch(*inputs: Any) -> Y:
        with launching_directly():
            return function(*inputs)

    return launch


def _declared_as(function: Callable[..., Y], outputs: Callable[..., Y]) -> Callable[..., Y]:
    """``function`` with the signature of ``outputs``, from which a triton_op takes its schema, whatever it is given."""

    @functools.wraps(function)  # torch's search for kernels unwraps it
    def declared(*inputs: Any) -> Y:
        return function(*inputs)

    declared.__signature__ = flat_signature(outputs)  # type: ignore[attr-defined]
    return declared
