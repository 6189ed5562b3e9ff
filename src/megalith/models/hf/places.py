"""Where a tensor of ours lies in those of another system: which part of it in which of theirs, in which order.

Theirs may be ours with its dimensions in another order, several of ours end to end, or a matrix of one expert, which
ours has packed with those of the others.
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
# what is packed into one parameter of all experts, along its second dimension
_PACKED = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Place:
    """The tensor of theirs, by its key, that holds one of ours, with our dimensions in the order ``dims``.

    Dimensions of ours in a tuple are one of theirs, in which the last of them varies fastest. () is our own order.
    Tensors of ours with the same key lie in it end to end along their first dimension, in the order of
    ``parameter_shapes``.
    """

    key: str
    dims: Dims = ()


@dataclass(frozen=True)
class Part:
    """What has a place: our ``parameter``, or what is packed in it at the leading ``index``, under its own ``name``.

    ``shape`` is without the dimensions of ``index``.
    """

    name: str
    parameter: str
    index: tuple[int, ...]
    shape: Shape

    @property
    def box(self) -> Box:
        """Where it lies in the parameter."""
        return Box((*((i, i + 1) for i in self.index), *Box.whole(self.shape).ranges))


@dataclass(frozen=True)
class Packed:
    """A tensor of theirs: ``parts`` of ours end to end along their first dimension, then as ``Place.dims`` says."""

    parts: tuple[Part, ...]
    dims: Dims

    @property
    def whole(self) -> Shape:
        """The shape of the parts together, with the dimensions of ours."""
        first, *rest = [part.shape for part in self.parts]
        return (first[0] + sum(shape[0] for shape in rest), *first[1:])

    @property
    def order(self) -> tuple[int, ...]:
        """Our dimensions in the order of theirs."""
        return tuple(d for group in self._groups for d in group)

    @property
    def shape(self) -> Shape:
        """The shape of their tensor."""
        return tuple(prod(self.whole[d] for d in group) for group in self._groups)

    @property
    def is_parameter(self) -> bool:
        """Whether it is one parameter of ours as it is."""
        return len(self.parts) == 1 and not self.parts[0].index and not self.dims

    def views(self, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Our parts as views of their tensor."""
        unmerged = tensor.view([self.whole[d] for d in self.order])
        whole = unmerged.permute([self.order.index(d) for d in range(len(self.order))])
        start = 0
        for part in self.parts:
            yield part, whole[start : start + part.shape[0]]
            start += part.shape[0]

    def boxes(self) -> Iterator[tuple[Part, Box]]:
        """All of their tensor in the indices of each parameter: it reaches beyond a part that is not alone in it."""
        start = 0
        for part in self.parts:
            first, *rest = Box.whole(self.whole).ranges
            leading = part.box.ranges[: len(part.index)]
            yield part, Box((*leading, (first[0] - start, first[1] - start), *rest))
            start += part.shape[0]

    @property
    def _groups(self) -> list[tuple[int, ...]]:
        """Our dimensions by theirs."""
        dims = self.dims or range(len(self.parts[0].shape))
        return [group if isinstance(group, tuple) else (group,) for group in dims]


def parts_of(parameter: str, shape: Shape, separate_experts: bool) -> Iterator[Part]:
    """The whole of ``parameter``, or with ``separate_experts`` the matrices and biases that are packed in it.

    Those have the names that Hugging Face gives to the layers of an expert, with its index after ``experts``.
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
