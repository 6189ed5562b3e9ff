"""parameters: declared or refused, the same bits in every layout, tied ones once, and gradients by declared use.

Buffers: recreated when a model built on meta is allocated, and in checkpoints if persistent.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megalith.errors import ShapeError
from megalith.numerics.initialization import normal_shard
from megalith.parallel.parameters import (
    DeclaringModule,
    ParameterSpec,
    declared_buffers,
    declared_parameters,
    initialize_parameters_,
    local,
    refill_buffers_,
    state_tensors,
)
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from tests.parallel.groups import Part, collection, part, slice_of
from tests.rank_pool import ranks

SPECS = {
    "column": ParameterSpec((13, 8), "normal", 0.5, split={"tp": 0}),  # over tp 4: 4, 4, 4 and 1 rows
    "row": ParameterSpec((8, 7), "normal", 2.0, split={"tp": 1}),
    "whole": ParameterSpec((5, 8), "normal", 0.02),
    "vector": ParameterSpec((11,), "normal", 1.0, split={"tp": 0}),
    "packed": ParameterSpec((2, 7, 8), "normal", 1.0, split={"tp": 1}),
    "gain": ParameterSpec((6,), "ones"),
    "shift": ParameterSpec((9,), "zeros", split={"tp": 0}),
}
SINGLE = ProcessGroupCollection.single()


class Inner(DeclaringModule):
    def __init__(self, groups: ProcessGroupCollection, dtype: torch.dtype) -> None:
        super().__init__()
        for name, spec in SPECS.items():
            self.declare(name, spec, groups, dtype)


class Outer(DeclaringModule):
    def __init__(self, groups: ProcessGroupCollection, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Inner(groups, dtype)
        self.second = Inner(groups, dtype)


def tied() -> Outer:
    model = Outer(SINGLE)
    model.second.whole = model.first.whole
    return model


def weights(tensor: int, replicate: int, shards: bool) -> tuple[dict[str, Part], dict[str, str]]:
    """This rank's part of each parameter of a model built in one layout, and its placements."""
    groups = collection(tensor, replicate)
    with torch.device("meta"):
        model = Outer(groups)
    if shards:
        shard_model(
            model,
            [model.first],
            groups,
            compute_dtype=torch.float32,
            param_dtype=torch.float32,
            reshard_after_forward=True,
        )
    model.to_empty(device="cpu")
    initialize_parameters_(model, seed=7)
    named = {name: parameter for name, parameter, _ in declared_parameters(model)}
    return {name: part(parameter) for name, parameter in named.items()}, {
        name: str(getattr(parameter, "placements", None)) for name, parameter in named.items()
    }


def weights_of_one_process() -> dict[str, torch.Tensor]:
    model = Outer(SINGLE)
    initialize_parameters_(model, seed=7)
    return {name: parameter.detach() for name, parameter, _ in declared_parameters(model)}


@pytest.mark.parametrize(
    ("num_ranks", "tensor", "replicate", "shards"),
    [
        (2, 2, 1, False),
        (2, 2, 1, True),
        (2, 1, 1, True),
        (2, 1, 2, True),
        (4, 4, 1, False),
        (4, 2, 1, True),
        (4, 2, 2, True),
        (4, 1, 2, True),
    ],
)
def test_weights_are_the_same_bits_in_every_layout(num_ranks, tensor, replicate, shards):
    want = weights_of_one_process()
    for parts, _ in ranks(num_ranks, weights, tensor, replicate, shards):
        assert parts.keys() == want.keys()
        for name, (where, values) in parts.items():
            assert torch.equal(values, slice_of(want[name], where)), name


def test_a_parameter_carries_its_placement():
    for _, placements in ranks(2, weights, 2, 1, False):
        assert placements["first.column"] == str((Shard(0),))
        assert placements["first.row"] == placements["first.packed"] == str((Shard(1),))
        assert placements["first.whole"] == placements["first.gain"] == str((Replicate(),))


def test_first_values_are_those_of_the_declaration():
    got = weights_of_one_process()
    for module in ("first", "second"):
        assert (got[f"{module}.gain"] == 1.0).all()
        assert (got[f"{module}.shift"] == 0.0).all()
    want = normal_shard(7, "second.row", (8, 7), (0, 0), (8, 7), 2.0)
    assert torch.equal(got["second.row"], want)
    assert not torch.equal(got["second.row"], got["first.row"]), "a parameter's own name decides its values"


def test_tied_parameters_count_once_under_their_first_name():
    names = [name for name, _, _ in declared_parameters(tied())]
    assert len(names) == len(set(names)) == 2 * len(SPECS) - 1
    assert "first.whole" in names
    assert "second.whole" not in names


def test_float64_weights_are_the_float32_ones():
    wide, narrow = Outer(SINGLE, torch.float64), weights_of_one_process()
    initialize_parameters_(wide, seed=7)
    for name, parameter, _ in declared_parameters(wide):
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, narrow[name].double())


@pytest.mark.parametrize("in_a_declaring_module", [True, False])
def test_an_undeclared_parameter_is_refused_by_its_name(in_a_declaring_module):
    model = Outer(SINGLE)
    if in_a_declaring_module:
        model.second.temperature = nn.Parameter(torch.ones(()))
    else:
        model.second.head = nn.Linear(2, 2)
    name = "temperature" if in_a_declaring_module else r"head\.weight"
    with pytest.raises(ShapeError, match=rf"second\.{name} is not declared; register it with DeclaringModule.declare"):
        list(declared_parameters(model))


def gradient_placements(partial: bool) -> dict[str, object]:
    """The placements and the unsharded value of the gradient of ``whole``, after each rank used it differently."""
    groups = collection(2)
    model = Inner(groups, torch.float64)
    initialize_parameters_(model, seed=7)
    used = local(model.whole, partial=partial)
    # A dense gradient, as matrix products return: torch 2.11 all-reduces an expanded scalar gradient immediately.
    used.backward(torch.full_like(used, groups.rank("tp") + 1 if partial else 3))
    assert isinstance(model.whole.grad, DTensor)
    return {"placements": model.whole.grad.placements, "whole": model.whole.grad.full_tensor()}


def test_a_use_says_whether_its_gradient_is_one_term_of_a_sum():
    for answer in ranks(2, gradient_placements, True):
        assert answer["placements"] == (Partial(),)
        assert (answer["whole"] == 3.0).all()  # 1 on rank 0 and 2 on rank 1
    for answer in ranks(2, gradient_placements, False):
        assert answer["placements"] == (Replicate(),)
        assert (answer["whole"] == 3.0).all()


def test_on_one_process_a_parameter_is_plain_and_used_as_it_is():
    model = Inner(SINGLE, torch.float32)
    assert local(model.column) is local(model.column, partial=True) is model.column


@pytest.mark.parametrize(
    ("family", "split", "message"),
    [
        ("dense", {"ep": 0}, r"an axis of dense weights \(tp\) to a dimension of \[5, 8\]; got 'ep': 0"),
        ("dense", {"tp": 2}, r"got 'tp': 2"),
        ("dense", {"tp": -1}, r"got 'tp': -1"),
        ("dense", {"cp": 0}, r"got 'cp': 0"),
        ("expert", {"tp": 0}, r"an axis of expert weights \(ep, etp\) .*got 'tp': 0"),
        ("expert", {"ep": 0, "etp": 2}, r"got 'etp': 2"),
    ],
)
def test_a_split_of_an_axis_or_dimension_that_there_is_not_is_refused(family, split, message):
    with pytest.raises(ShapeError, match=message):
        ParameterSpec((5, 8), "zeros", split=split, family=family)


EXPERTS = {
    "packed": ParameterSpec((5, 6, 3), "normal", 1.0, split={"ep": 0, "etp": 1}, family="expert"),  # 3 and 2 experts
    "twice": ParameterSpec((13,), "normal", 1.0, split={"ep": 0, "etp": 0}, family="expert"),
    "every": ParameterSpec((4, 3), "normal", 1.0, family="expert"),
}


def experts(groups: ProcessGroupCollection) -> DeclaringModule:
    model = DeclaringModule()
    for name, spec in EXPERTS.items():
        model.declare(name, spec, groups, torch.float32)
    initialize_parameters_(model, seed=7)
    return model


def expert_weights(expert: int, expert_tensor: int) -> dict[str, Part]:
    groups = ParallelState(RankGrid(4, expert=expert, expert_tensor=expert_tensor)).collection()
    return {name: part(parameter) for name, parameter, _ in declared_parameters(experts(groups))}


@pytest.mark.parametrize(("expert", "expert_tensor"), [(2, 2), (4, 1), (1, 4), (2, 1)])
def test_expert_weights_are_split_over_ep_and_etp_and_are_the_same_bits(expert, expert_tensor):
    want = {name: parameter.detach() for name, parameter, _ in declared_parameters(experts(SINGLE))}
    for name, spec in EXPERTS.items():
        held = torch.zeros(spec.shape)
        for parts in ranks(4, expert_weights, expert, expert_tensor):
            where, values = parts[name]
            assert torch.equal(values, slice_of(want[name], where)), name
            slice_of(held, where).add_(1)
        copies = 4 if not spec.split else 4 // (expert * expert_tensor)
        assert (held == copies).all(), name


class Buffered(DeclaringModule):
    """A table derived from its shape, and a count that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.declare("gain", SPECS["gain"], SINGLE, torch.float32)
        self.declare_buffer("table", lambda: torch.arange(4.0))
        self.declare_buffer("seen", lambda: torch.full((3,), 7, dtype=torch.int64), saved=True)


def test_declared_buffers_are_made_again_after_meta():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": Buffered(), "b": Buffered()})
    assert all(buffer.is_meta for buffer in model.buffers())
    model.to_empty(device="cpu")  # NaN, or garbage
    refill_buffers_(model)
    for module in model.values():
        assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert module.seen.tolist() == [7, 7, 7]
        assert (module.table.device.type, module.seen.dtype) == ("cpu", torch.int64)


def test_declared_buffers_are_given_by_name_with_their_declarations():
    model = nn.ModuleDict({"a": Buffered()})
    found = {name: (buffer, spec.saved) for name, buffer, spec in declared_buffers(model)}
    assert found == {"a.table": (model["a"].table, False), "a.seen": (model["a"].seen, True)}


@pytest.mark.parametrize("in_a_declaring_module", [True, False])
def test_an_undeclared_buffer_is_refused_by_its_name(in_a_declaring_module):
    model = nn.ModuleDict({"a": Buffered()})
    if in_a_declaring_module:
        model["a"].register_buffer("mean", torch.zeros(3))
    else:
        model["a"].norm = nn.BatchNorm1d(3, affine=False)
    name = "mean" if in_a_declaring_module else r"norm\.running_mean"
    for ask in (lambda: list(declared_buffers(model)), lambda: refill_buffers_(model), lambda: state_tensors(model)):
        with pytest.raises(ShapeError, match=rf"buffer a\.{name} is not declared.*DeclaringModule.declare_buffer"):
            ask()


def test_a_checkpoint_holds_parameters_and_saved_buffers_of_all_chunks():
    first, second = nn.ModuleDict({"a": Buffered()}), nn.ModuleDict({"b": Buffered()})
    got = state_tensors(first, second)
    assert got.keys() == {"a.gain", "a.seen", "b.gain", "b.seen"}
    assert got["b.seen"] is second["b"].seen
    assert got["a.gain"] is first["a"].gain
    assert first.state_dict().keys() == {"a.gain", "a.seen"}, "torch saves the same"


def test_a_checkpoint_holds_tied_parameters_once():
    assert len(state_tensors(tied())) == 2 * len(SPECS) - 1


def test_a_checkpoint_holds_the_first_of_two_chunks_that_have_a_parameter_of_one_name():
    first, second = nn.ModuleDict({"a": Buffered()}), nn.ModuleDict({"a": Buffered()})
    assert [(name, parameter is first["a"].gain) for name, parameter, _ in declared_parameters(first, second)] == [
        ("a.gain", True)
    ]
