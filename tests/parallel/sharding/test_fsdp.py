"""fsdp: gradients are undivided sums in every layout; which dimension is sharded, in which dtype, and when."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from megalith.errors import ShapeError
from megalith.parallel.build_options import BuildOptions, MatrixProduct
from megalith.parallel.local_ranges import local_ranges
from megalith.parallel.parameters import (
    DeclaringModule,
    ParameterSpec,
    declared_parameters,
    initialize_parameters_,
    local,
)
from megalith.parallel.pipeline.split_product import SplitProduct
from megalith.parallel.sharding import fsdp
from megalith.parallel.sharding.fsdp import finish_backward, gradient_sync, release_gathered_weights, shard_model
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks

H, F = 8, 12
NUM_SUMS = 256
EXACT = 1e-13  # sums of a few dozen terms in float64
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (4, 1, 4), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 1)]


class Pair(DeclaringModule):
    """Two linear layers; their biases of 12 and 8 elements divide over 4 ranks, with tp as well."""

    def __init__(self, options: BuildOptions) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(H, F, options, bias=True, std=0.5)
        self.down = RowParallelLinear(F, H, options, bias=True, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(DeclaringModule):
    def __init__(
        self, groups: ProcessGroupCollection, dtype: torch.dtype, matrix_product: MatrixProduct = linear
    ) -> None:
        super().__init__()
        options = BuildOptions(groups, dtype, matrix_product=matrix_product)
        self.pairs = nn.ModuleList(Pair(options) for _ in range(2))
        self.head = ColumnParallelLinear(H, F, options, bias=False, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x)
        return self.head(x)


def sharded(tensor: int = 1, replicate: int = 1, matrix_product: MatrixProduct = linear, **changes: Any) -> Stack:
    groups = collection(tensor, replicate)
    options = {"compute_dtype": torch.float64, "param_dtype": torch.float64, "reshard_after_forward": True} | changes
    with torch.device("meta"):
        model = Stack(groups, options["param_dtype"], matrix_product)
    shard_model(model, model.pairs, groups, **options)
    model.to_empty(device="cpu")
    initialize_parameters_(model, seed=3)
    return model


def samples(dtype: torch.dtype = torch.float64) -> Tensor:
    """[samples, 1, H]: eight of them, split over data-parallel ranks and micro-batches."""
    return torch.randn(8, 1, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def gradients(tensor: int, replicate: int, micro_batches: int, reshard: bool, reduce_each: bool) -> dict[str, Tensor]:
    """The unsharded gradient of the sum of squares over all samples, of which each rank has seen its own."""
    model = sharded(tensor, replicate, reshard_after_forward=reshard)
    groups = collection(tensor, replicate)
    micro = samples().chunk(groups.size("dp"))[groups.rank("dp")].chunk(micro_batches)
    for index, x in enumerate(micro):
        gradient_sync(model, last=reduce_each or index == len(micro) - 1)
        model(x).square().sum().backward()
    return {name: whole(parameter.grad) for name, parameter, _ in declared_parameters(model)}


def gradients_of_one_process() -> dict[str, Tensor]:
    model = Stack(ProcessGroupCollection.single(), torch.float64)
    initialize_parameters_(model, seed=3)
    model(samples()).square().sum().backward()
    return {name: parameter.grad for name, parameter, _ in declared_parameters(model)}


@pytest.mark.parametrize(("num_ranks", "tensor", "replicate"), LAYOUTS)
def test_a_gradient_is_the_sum_over_all_samples_in_every_layout(num_ranks, tensor, replicate):
    want = gradients_of_one_process()
    for got in ranks(num_ranks, gradients, tensor, replicate, 1, True, False):
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("reshard", "reduce_each"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_ranks", "tensor", "replicate"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 2)])
def test_micro_batches_add_up(num_ranks, tensor, replicate, reshard, reduce_each):
    want = gradients_of_one_process()
    for got in ranks(num_ranks, gradients, tensor, replicate, 2, reshard, reduce_each):
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def names_of_operators_in_backward() -> set[str]:
    model = sharded()
    loss = model(samples()).square().sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_gradient_is_divided_where_weights_are_not_replicated(num_ranks):
    for found in ranks(num_ranks, names_of_operators_in_backward):
        assert "aten::mm" in found
        assert found.isdisjoint({"aten::div", "aten::div_"})


def memory_of_gradients(tensor: int, replicate: int) -> tuple[list[int], set[int]]:
    """The addresses that reductions are given memory at, and those of the gradients."""
    given: list[int] = []
    allocate = fsdp._InPlace.allocate

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        found = allocate(*arguments, **options)
        given.append(found.data_ptr())
        return found

    with patch.object(fsdp._InPlace, "allocate", recorded):
        model = sharded(tensor, replicate)
        model(samples()).square().sum().backward()
    return given, {parameter.grad.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}


@pytest.mark.parametrize(("num_ranks", "tensor", "replicate"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1)])
def test_where_nothing_is_scattered_gradients_are_reduced_in_place(num_ranks, tensor, replicate):
    for given, of_gradients in ranks(num_ranks, memory_of_gradients, tensor, replicate):
        if (num_ranks, tensor, replicate) == (2, 1, 1):
            assert given == []
        else:
            assert given[::2] == given[1::2]  # input and output of the three units
            assert len(of_gradients) == 3
            assert of_gradients == set(given)


def reductions(micro_batches: int) -> list[bool]:
    """After each micro-batch, whether the gradients of the first unit have been reduced."""
    model = sharded()
    reduced = []
    for index in range(micro_batches):
        gradient_sync(model, last=index == micro_batches - 1)
        model(samples()).sum().backward()
        reduced.append(model.pairs[0].up.weight.grad is not None)
    return reduced


def test_only_the_last_micro_batch_reduces():
    assert ranks(2, reductions, 3) == [[False, False, True]] * 2


def gradients_apart(tensor: int, replicate: int) -> tuple[dict[str, Tensor], list[bool]]:
    """As ``gradients``, with weight gradients computed after both backwards; and when they were reduced."""
    product = SplitProduct()
    model = sharded(tensor, replicate, reshard_after_forward=False, matrix_product=product)
    groups = collection(tensor, replicate)
    micro = samples().chunk(groups.size("dp"))[groups.rank("dp")].chunk(2)
    shard, parts, reduced = model.head.weight, [], []
    for x in micro:
        gradient_sync(model, last=False, keeps_weights=True)
        model(x.clone().requires_grad_()).square().sum().backward()
        parts.append(product.take())
    for index, left in enumerate(parts):
        gradient_sync(model, last=index == 1, keeps_weights=True)
        for part in left:
            part.backward()
        reduced.append(shard.grad is not None)
        finish_backward(model)
    reduced.append(shard.grad is not None)
    return {name: whole(parameter.grad) for name, parameter, _ in declared_parameters(model)}, reduced


@pytest.mark.parametrize(("num_ranks", "tensor", "replicate"), [(2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)])
def test_gradients_that_are_computed_after_a_backward_are_reduced_when_it_is_finished(num_ranks, tensor, replicate):
    want = gradients_of_one_process()
    for got, reduced in ranks(num_ranks, gradients_apart, tensor, replicate):
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
        assert reduced == [False, False, True]


def sum_of_narrow_gradients() -> float:
    """1 + 2^-9: the bfloat16 weight gradients of two backwards, both computed after the second one."""
    product, groups = SplitProduct(), collection()
    options = BuildOptions(groups, torch.float32, matrix_product=product)
    model = ColumnParallelLinear(H, F, options, bias=False, std=0.5)
    dtypes = {"compute_dtype": torch.bfloat16, "param_dtype": torch.float32}
    shard_model(model, [], groups, reshard_after_forward=False, **dtypes)
    parts = []
    for value in (1.0, 2.0**-9):
        gradient_sync(model, last=False, keeps_weights=True)
        model(torch.full((1, 1, H), value, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        parts += product.take()
    for part in parts:
        gradient_sync(model, last=part is parts[-1], keeps_weights=True)
        part.backward()
        finish_backward(model)
    [value] = whole(model.weight.grad).unique().tolist()
    return value


def test_gradients_that_are_computed_after_a_backward_add_up_in_the_dtype_of_the_reduction():
    assert ranks(1, sum_of_narrow_gradients) == [1.0 + 2.0**-9]


def dimensions(tensor: int, replicate: int) -> dict[str, tuple[Any, int]]:
    """The placements of each parameter, and how many elements this rank holds."""
    model = sharded(tensor, replicate)
    return {
        name: (parameter.placements, parameter.to_local().numel()) for name, parameter, _ in declared_parameters(model)
    }


def test_fsdp_cuts_the_dimension_that_tp_leaves_whole():
    for held in ranks(4, dimensions, 2, 1):
        assert held["pairs.0.up.weight"] == ((Shard(1), Shard(0)), F * H // 4)
        assert held["pairs.0.down.weight"] == ((Shard(0), Shard(1)), F * H // 4)
        assert held["head.weight"] == ((Shard(1), Shard(0)), F * H // 4)
        assert held["pairs.0.up.bias"][1] == F // 4
    for held in ranks(4, dimensions, 1, 2):
        assert held["pairs.0.up.weight"][1] == F * H // 2
        assert held["pairs.0.up.weight"][0][-1] == Shard(0)


class Packed(DeclaringModule):
    """Grouped queries in one weight, as [groups, out, in], split over tp in the middle dimension."""

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        spec = ParameterSpec((3, 4, 8), "zeros", split={"tp": 1})
        self.declare("weight", spec, groups, torch.float32)


def packed_placements(tensor: int) -> tuple[Any, ...]:
    model, groups = Packed(collection(tensor)), collection(tensor)
    dtypes = {"compute_dtype": torch.float32, "param_dtype": torch.float32}
    shard_model(model, [], groups, reshard_after_forward=False, **dtypes)
    return model.weight.placements


def test_of_two_dimensions_that_tp_leaves_whole_fsdp_cuts_the_last():
    assert ranks(4, packed_placements, 2) == [(Shard(2), Shard(1))] * 4
    assert ranks(4, packed_placements, 1) == [(Shard(0),)] * 4  # its own choice, where nothing is split


def mixed_precision(param_dtype: torch.dtype, compute_dtype: torch.dtype) -> dict[str, object]:
    model = sharded(param_dtype=param_dtype, compute_dtype=compute_dtype)
    y = model(samples(compute_dtype))
    y.sum().backward()
    weight = model.pairs[0].up.weight
    return {"y": y.dtype, "weight": weight.dtype, "gradient": weight.grad.dtype}


def test_forward_computes_in_one_dtype_and_parameters_and_gradients_stay_in_another():
    bf16, fp32 = torch.bfloat16, torch.float32
    assert ranks(2, mixed_precision, fp32, bf16) == [{"y": bf16, "weight": fp32, "gradient": fp32}] * 2
    assert ranks(2, mixed_precision, fp32, fp32) == [{"y": fp32, "weight": fp32, "gradient": fp32}] * 2


def sum_of_what_bfloat16_cannot_add() -> float:
    """The gradient of a bias: 1 on rank 0 and 1/512 on rank 1, each exact in bfloat16 while their sum is not."""
    model = sharded(param_dtype=torch.float32, compute_dtype=torch.bfloat16)
    x = torch.zeros(1, 1, H, dtype=torch.bfloat16)
    y = model.pairs[1](model.pairs[0](x))
    (y.sum() * (1.0 if dist.get_rank() == 0 else 1.0 / 512)).backward()
    return whole(model.pairs[1].down.bias.grad)[0].item()


def test_sums_over_ranks_are_formed_in_float32():
    assert ranks(2, sum_of_what_bfloat16_cannot_add) == [1.0 + 1.0 / 512] * 2


class Scale(DeclaringModule):
    """A weight that each rank of tp applies to its own tokens."""

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.declare("weight", ParameterSpec((NUM_SUMS,), "ones"), groups, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return x * local(self.weight, partial=True)


def sum_over_tp() -> tuple[Tensor, Tensor]:
    """The gradient of one micro-batch in bfloat16, and the term that this rank contributed."""
    groups = collection(tensor=4)
    model = Scale(groups)
    shard_model(model, [], groups, compute_dtype=torch.bfloat16, param_dtype=torch.float32, reshard_after_forward=False)
    term = torch.randn(NUM_SUMS, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    model(term).sum().backward()
    return whole(model.weight.grad), term


def test_partial_gradients_of_one_micro_batch_are_summed_in_float32_and_rounded_once():
    gradients, terms = zip(*ranks(4, sum_over_tp), strict=True)
    want = torch.stack(terms).float().sum(0).bfloat16().float()
    for gradient in gradients:
        assert torch.equal(gradient, want)


def gathered_after_forward(reshard_after_forward: bool) -> tuple[int, int, int]:
    """Elements present of the first and the last unit's weight after a forward, and of both after its backward."""
    model = sharded(reshard_after_forward=reshard_after_forward)
    y = model(samples())
    weights = [pair.up.weight for pair in model.pairs]
    first, last = (w.to_local().numel() if isinstance(w, DTensor) else w.numel() for w in weights)
    y.sum().backward()
    return first, last, sum(pair.up.weight.to_local().numel() for pair in model.pairs)


def test_weights_are_freed_after_forward_or_kept_until_backward_and_those_of_the_last_unit_are_kept():
    assert ranks(2, gathered_after_forward, True) == [(H * F // 2, H * F, H * F)] * 2
    assert ranks(2, gathered_after_forward, False) == [(H * F, H * F, H * F)] * 2


def released() -> tuple[bool, int]:
    """Whether a forward alone leaves weights gathered, and how many elements are present after they are released."""
    model = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(samples())
    gathered = not isinstance(model.head.weight, DTensor)
    release_gathered_weights(model)
    return gathered, sum(parameter.to_local().numel() for parameter in model.parameters())


def test_a_forward_without_backward_can_give_its_weights_back():
    num_elements = 2 * (2 * F * H + F + H) + F * H
    assert ranks(2, released) == [(True, num_elements // 2)] * 2


def refuse_weights_tied_between_units() -> None:
    groups = collection()
    model = Stack(groups, torch.float32)
    model.pairs[1].up.weight = model.pairs[0].up.weight
    with pytest.raises(ShapeError, match=r"shared by two units.*register it in one"):
        shard_model(
            model,
            model.pairs,
            groups,
            compute_dtype=torch.float32,
            param_dtype=torch.float32,
            reshard_after_forward=True,
        )


def test_weights_tied_between_units_are_refused():
    ranks(2, refuse_weights_tied_between_units)


class Mixture(DeclaringModule):
    """A unit with a router and experts, which cannot be sharded over the same mesh."""

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.block = DeclaringModule()
        self.block.declare("router", ParameterSpec((4, 8), "zeros"), groups, torch.float32)
        experts = ParameterSpec((4, 8, 8), "zeros", split={"ep": 0, "etp": 1}, family="expert")
        self.block.declare("experts", experts, groups, torch.float32)


@pytest.mark.parametrize(("units", "name"), [(["block"], "block"), ([], "the model")])
def test_dense_and_expert_weights_in_one_unit_are_refused_by_the_name_of_the_unit(units, name):
    groups = ProcessGroupCollection.single()  # refused before any mesh is requested
    model = Mixture(groups)
    with pytest.raises(ShapeError, match=rf"^{name} holds both dense and expert weights.*as a unit before it"):
        shard_model(
            model,
            [model.get_submodule(unit) for unit in units],
            groups,
            compute_dtype=torch.float32,
            param_dtype=torch.float32,
            reshard_after_forward=True,
        )


def parts_of_a_bias() -> tuple[tuple[int, int], ...]:
    model = sharded(tensor=2)
    return local_ranges(model.pairs[0].up.bias)


def test_a_bias_that_tp_and_fsdp_both_cut_is_partitioned():
    # tp gives ranks 0 and 2 the first half, and FSDP gives each of them half of that
    assert ranks(4, parts_of_a_bias) == [((0, 3),), ((6, 9),), ((3, 6),), ((9, 12),)]
