"""Registers a forward and a backward function as one differentiable torch operator.

Three kinds of functions, one registration. Compiled Triton launchers become a ``triton_op``: torch.compile sees their
kernels and plans memory around them. Interpreted ones become a ``custom_op``, which torch.compile takes as it is: the
interpreter reads data pointers, which the tensors of a trace do not have. So do functions over blocks of rows.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megalith.fusions.core.devices import on_the_device_of_its_tensors
from megalith.fusions.core.eager import NON_TENSOR_TYPES, call_in_backward, eager_or_operator, recorded
from megalith.fusions.core.records import flat_signature
from megalith.fusions.core.rows import as_rows, fresh_like
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
_SAVED = object()  # among what backward keeps: the next of the saved tensors


class Computes(Protocol[Y_co]):
    """A function of positional operands that autograd does not see through."""

    def __call__(self, *inputs: Any) -> Y_co: ...

    @property
    def implementation(self) -> Callable[..., Y_co]:
        """What the operator computes, of tensors that nothing traces."""


class Differentiable(Protocol[Y_co, G_co]):
    """A function of positional operands that autograd sees through, and its gradient by itself."""

    def __call__(self, *inputs: Any) -> Y_co: ...

    @property
    def back(self) -> "Computes[G_co]":
        """The registered backward; it records no gradient."""

    @property
    def implementation(self) -> Callable[..., Y_co]:
        """What the operator computes, of tensors that nothing traces and nothing is recorded of."""


@dataclass(frozen=True)
class Operator(Generic[Y, G]):
    """A differentiable operator as it is declared; each of its implementations is registered under a name of its own.

    Args:
        outputs: allocates what forward returns, from the same inputs: tensors, None, numbers, strings. Its annotations
            are the schema, those of a record's fields too (``core.records``), and it tells torch.compile the shapes.
        gradients: what ``outputs`` is to forward, it is to backward. Backward gets the gradients of the first
            ``num_differentiable`` outputs, then what ``saves`` gave, and, if ``gradients`` has an argument ``needs``, a
            list of bool: which of ``of`` are wanted. It returns a tensor for each of them, empty where none is wanted
            or the input was None; one empty tensor may stand for several, so that nobody may write into it.
        of: names of the inputs that have gradients, in the order that backward returns them.
        saves: picks what backward needs, from the tuple of outputs and the inputs; by default all inputs.
        passes: names, from the inputs, those whose gradient is that of the first output, as it is; backward, if it is
            called at all, is not asked for them.
        shares: from the inputs, those whose gradient is that of another, by names; backward is asked for the other,
            as an operator may not return one tensor twice.
        num_differentiable: outputs past these have no gradient: statistics that only backward reads.
        absent_as_none: backward takes None for the gradient of an output that nothing was computed from; else zeros.
        rows: names of operands, forward and backward, that are rows [T, F] and may also come as [..., F]. Functions get
            them flattened; outputs with a gradient, where they are rows, and gradients of such operands come in the
            shape given. A view outside of the operator would cost autograd more than a small operation does, and what
            backward keeps of an output would be another tensor than the caller's: autograd would not see that the
            caller writes into it.
    """

    outputs: Callable[..., Y]
    gradients: Callable[..., G]
    of: Sequence[str]
    saves: Saves | None = None
    passes: Passes | None = None
    shares: Shares | None = None
    num_differentiable: int = 1
    absent_as_none: bool = False
    rows: Sequence[str] = ()

    def register(
        self, name: str, forward: Callable[..., Y], backward: Callable[..., G], *, opaque: bool = False
    ) -> Differentiable[Y, G]:
        """``megalith::<name>`` with its gradient ``megalith::<name>_back``, of functions that write fresh tensors only.

        The gradient has no gradient of its own: a second derivative raises instead of being wrong.

        Args:
            opaque: they are not made of Triton kernels.
        """
        operator, implementation = _define(
            name, forward, self.outputs, opaque, of_rows=_Rows(self.rows, range(self.num_differentiable))
        )
        of_gradients = _Rows(self.rows, [index for index, of in enumerate(self.of) if of in self.rows])
        gradient = eager_or_operator(*_define(f"{name}_back", backward, self.gradients, opaque, of_rows=of_gradients))
        setup_context, gradients = self._around(gradient)
        torch.library.register_autograd(f"megalith::{name}", gradients, setup_context=setup_context)
        differentiable = recorded(name, implementation, setup_context, gradients)
        call: Any = eager_or_operator(operator, implementation, differentiable)
        call.back = gradient
        registered: Differentiable[Y, G] = call
        return registered

    def _around(self, gradient: Callable[..., G]) -> tuple[Callable[..., None], Callable[..., Any]]:
        """What ``torch.library.register_autograd`` takes, for a backward that is ``gradient``."""
        input_names = list(flat_signature(self.outputs).parameters)
        positions = [input_names.index(of) for of in self.of]
        takes_needs = "needs" in flat_signature(self.gradients).parameters
        saves, passes, shares = self.saves, self.passes, self.shares
        num_differentiable, absent_as_none = self.num_differentiable, self.absent_as_none

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            has_statistics = len(outputs) > num_differentiable
            if has_statistics:
                ctx.mark_non_differentiable(*outputs[num_differentiable:])
            if has_statistics or absent_as_none:  # torch would fill zeros for statistics too
                ctx.set_materialize_grads(False)
            fills = has_statistics and not absent_as_none
            ctx.zeros_like = [(y.shape, y.dtype, y.device) for y in outputs[:num_differentiable]] if fills else None
            kept = list(inputs if saves is None else saves(outputs, *inputs))
            tensors = []
            for place, x in enumerate(kept):
                if type(x) not in NON_TENSOR_TYPES and isinstance(x, Tensor):
                    tensors.append(x)
                    kept[place] = _SAVED
            ctx.save_for_backward(*tensors)
            ctx.kept = kept
            ctx.passed = [input_names.index(name) for name in passes(*inputs)] if passes else []
            of_name = shares(*inputs) if shares else None
            ctx.shared = {input_names.index(name): input_names.index(of) for name, of in (of_name or {}).items()}

        def gradients(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            needed, passed, shared = ctx.needs_input_grad, ctx.passed, ctx.shared
            wanted = [needed[position] for position in positions]
            if passed or shared:
                asked = {shared.get(position, position) for position in positions if needed[position]}
                wanted = [position in asked and position not in passed for position in positions]
            found: list[Tensor | None] = [None] * len(needed)
            if True in wanted:  # an input without a gradient may require one
                upstream = dy[:num_differentiable]
                if ctx.zeros_like:
                    upstream = tuple(map(_zeros_for_none, upstream, ctx.zeros_like))
                tensors = iter(ctx.saved_tensors)
                operands = [*upstream, *[next(tensors) if x is _SAVED else x for x in ctx.kept]]
                if takes_needs:
                    operands.append(wanted)
                results = call_in_backward(gradient, dy, operands)
                for position, result in zip(positions, results, strict=True):
                    if needed[position]:
                        found[position] = result
            for position in passed:
                found[position] = dy[0] if needed[position] else None
            for position, of in shared.items():
                found[position] = results[positions.index(of)] if needed[position] else None
            return tuple(found)

        return setup_context, gradients


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


def _zeros_for_none(dy: Tensor | None, like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy


def gradients_like(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Fresh memory for the gradient of each of ``inputs``, contiguous, in its dtype; one empty tensor for all Nones."""
    nothing = next(x for x in inputs if x is not None).new_empty(0)
    return tuple([nothing if x is None else fresh_like(x) for x in inputs])


def wrap_triton(kernel: Any) -> Any:
    """``kernel`` for an operator to launch. Call it by this bare name: torch's compile cache scans launchers for it.

    Its arguments are tensors, numbers and None, one by one. Triton takes a tuple of strides too, and makes the same
    code of it; torch.compile (2.13) does not: Inductor refuses such an argument, sizes in it that are symbols are lost,
    and every tensor then counts as written. Functions that a kernel calls may take tuples.
    """
    return kernel if triton_interprets() else torch.library.wrap_triton(kernel)


class _Rows(NamedTuple):
    """Which operands are rows that may come in any shape [..., F], and which results then have that shape."""

    names: Sequence[str]
    results: Sequence[int]

    def of_any_shape(self, function: Callable[..., Y], signature: inspect.Signature) -> Callable[..., Y]:
        """``function`` of rows [T, F], and an allocator of its results, for operands [..., F]."""
        positions = [index for index, name in enumerate(signature.parameters) if name in self.names]
        if not positions:
            return function

        @functools.wraps(function)  # torch's search for kernels unwraps it
        def flattened(*inputs: Any) -> Any:
            first = inputs[positions[0]]
            if first is None:
                first = next(x for position in positions if (x := inputs[position]) is not None)
            if first.dim() == 2:
                return function(*inputs)
            leading = first.shape[:-1]
            operands = list(inputs)
            for position in positions:
                if inputs[position] is not None:
                    operands[position] = as_rows(inputs[position])
            found: Any = function(*operands)
            if isinstance(found, Tensor):
                return _in_shape(found, leading)
            results = list(found)
            for index in self.results:
                if results[index].dim() == 2:  # an absent gradient is empty, and a number for each row is no row
                    results[index] = _in_shape(results[index], leading)
            return tuple(results)

        return flattened


def _in_shape(x: Tensor, leading: torch.Size) -> Tensor:
    """``x`` [T, F], fresh memory, as [..., F] that is no view: of a view a Function's output would be one."""
    y: Tensor = torch.ops.aten._unsafe_view.default(x, [*leading, x.shape[-1]])
    return y


def _define(
    name: str,
    function: Callable[..., Y],
    outputs: Callable[..., Y],
    opaque: bool,
    mutates: Sequence[str] = (),
    of_rows: _Rows | None = None,
) -> tuple[Callable[..., Y], Callable[..., Y]]:
    """The operator, and what computes the same of tensors that nothing traces."""
    function = on_the_device_of_its_tensors(function)
    define: Any = torch.library.custom_op if opaque or triton_interprets() else torch.library.triton_op
    options: dict[str, Any] = {"mutates_args": tuple(mutates)}
    allocate = outputs
    if of_rows is not None:
        function, allocate = (of_rows.of_any_shape(one, flat_signature(outputs)) for one in (function, outputs))
    implementation = function
    function, allocate = _without_aliases(function), _without_aliases(allocate)
    if define is torch.library.custom_op:
        options["schema"] = torch.library.infer_schema(_declared_as(outputs, outputs), **options)
    else:
        function, implementation = _declared_as(function, outputs), _launching(function)
    operator: Callable[..., Y] = define(f"megalith::{name}", function, **options)
    torch.library.register_fake(f"megalith::{name}", allocate)
    return operator, implementation


def _without_aliases(function: Callable[..., Y]) -> Callable[..., Y]:
    """``function``, with an empty tensor of its own for each absent gradient: an operator may not return one twice."""

    @functools.wraps(function)  # torch's search for kernels unwraps it
    def with_copies(*inputs: Any) -> Any:
        found: Any = function(*inputs)
        if isinstance(found, tuple):
            found = tuple(y.new_empty(0) if any(y is x for x in found[:place]) else y for place, y in enumerate(found))
        return found

    return with_copies


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
