"""Where our tensors are stored in those of another system: in which tensor, which part of it, and in which order.

Their tensor may be ours with permuted dimensions, several of ours concatenated, or the matrix of a single expert, which
ours packs together with those of the other experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megalith.checkpoint.box import Box
from megalith.models.hf.parameters import Shape

__all__ = ["Dims", "Packed", "Part", "Place", "parts_of"]

Dims = tuple[int | tuple[int, ...], ...]

_EXPERTS = ".mlp.experts."
# projections packed along the second dimension of one parameter for all experts
_PACKED = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Place:
    """The key of their tensor that holds one of ours, and the order ``dims`` of our dimensions in it.

    Several of our dimensions in a tuple form one of theirs, with the last varying fastest. () is our own order. Tensors
    of ours with the same key are concatenated along their first dimension, in the order of ``parameter_shapes``.
    """

    key: str
    dims: Dims = ()


@dataclass(frozen=True)
class Part:
    """A tensor that has a place: our ``parameter``, or the slice of it at the leading ``index``, with its own ``name``.

    ``shape`` does not include the dimensions of ``index``.
    """

    name: str
    parameter: str
    index: tuple[int, ...]
    shape: Shape

    @property
    def box(self) -> Box:
        """Its box in the parameter."""
        return Box((*((i, i + 1) for i in self.index), *Box.whole(self.shape).ranges))


@dataclass(frozen=True)
class Packed:
    """A tensor of theirs: our ``parts`` concatenated along their first dimension, then permuted by ``Place.dims``."""

    parts: tuple[Part, ...]
    dims: Dims

    @property
    def whole(self) -> Shape:
        """The shape of the concatenated parts, in our order of dimensions."""
        first, *rest = [part.shape for part in self.parts]
        return (first[0] + sum(shape[0] for shape in rest), *first[1:])

    @property
    def order(self) -> tuple[int, ...]:
        """Our dimensions in their order."""
        return tuple(d for group in self._groups for d in group)

    @property
    def shape(self) -> Shape:
        """The shape of their tensor."""
        return tuple(prod(self.whole[d] for d in group) for group in self._groups)

    @property
    def is_parameter(self) -> bool:
        """Whether it is one parameter of ours, unchanged."""
        return len(self.parts) == 1 and not self.parts[0].index and not self.dims

    def views(self, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Yields our parts as views of their tensor."""
        unmerged = tensor.view([self.whole[d] for d in self.order])
        whole = unmerged.permute([self.order.index(d) for d in range(len(self.order))])
        start = 0
        for part in self.parts:
            yield part, whole[start : start + part.shape[0]]
            start += part.shape[0]

    def boxes(self) -> Iterator[tuple[Part, Box]]:
        """Yields their whole tensor as a box in each parameter's indices; it exceeds a part that is not alone in it."""
        start = 0
        for part in self.parts:
            first, *rest = Box.whole(self.whole).ranges
            leading = part.box.ranges[: len(part.index)]
            yield part, Box((*leading, (first[0] - start, first[1] - start), *rest))
            start += part.shape[0]

    @property
    def _groups(self) -> list[tuple[int, ...]]:
        """Our dimensions, grouped by theirs."""
        dims = self.dims or range(len(self.parts[0].shape))
        return [group if isinstance(group, tuple) else (group,) for group in dims]


def parts_of(parameter: str, shape: Shape, separate_experts: bool) -> Iterator[Part]:
    """Yields the whole of ``parameter``, or with ``separate_experts`` the matrices and biases packed in it.

    Those have Hugging Face's names for the layers of an expert, with the expert's index after ``experts``.
    """
    layer, of_experts, packed = parameter.partition(_EXPERTS)
    if not (of_experts and separate_experts):
        yield Part(parameter, parameter, (), shape)
        return
    linear, kind = (packed.removesuffix("_bias"), "bias") if packed.endswith("_bias") else (packed, "weight")
    for expert in range(shape[0]):
        name = f"{layer}{_EXPERTS}{expert}"
        if linear in _PACKED:
            for i, one in enumerate(_PACKED[linear]):
                yield Part(f"{name}.{one}.{kind}", parameter, (expert, i), shape[2:])
        else:
            yield Part(f"{name}.{linear}.{kind}", parameter, (expert,), shape[1:])
