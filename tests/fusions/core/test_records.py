"""Operand records: an operator's schema has the names and types of their fields."""

# ruff: noqa: UP044  a star would iterate over the record's class, which has no fields

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

import megalith.fusions  # registers the operators
from megalith.fusions.core.records import flat_signature


class Options(NamedTuple):
    scale: float
    dtype: torch.dtype | None


def test_the_fields_of_a_record_stand_in_its_place():
    def outputs(x: Tensor, up: Tensor | None, *options: Unpack[Options]) -> Tensor: ...

    flat = flat_signature(outputs)
    names = {name: parameter.annotation for name, parameter in flat.parameters.items()}
    assert names == {"x": Tensor, "up": Tensor | None, "scale": float, "dtype": torch.dtype | None}
    assert flat.return_annotation is Tensor


def test_a_signature_without_a_record_stays_as_it_is():
    def outputs(x: Tensor, scale: float) -> Tensor: ...

    assert list(flat_signature(outputs).parameters) == ["x", "scale"]


def test_the_schema_of_an_operator_names_every_operand():
    assert megalith.fusions.glu is not None
    schema = torch.ops.megalith.glu_blocked.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["x", "up", "bias", "weights", "activation", "offset", "clamp", "interleaved"]
    schema = torch.ops.megalith.masked_softmax_blocked_back.default._schema
    assert [argument.name for argument in schema.arguments][-2:] == ["scale", "sink_dtype"]
