"""Expert weights: split over ep and etp, sharded over their own ranks, with the bits and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.errors import ShapeError
from megalith.optim.grad_norm import local_squared_norm
from megalith.parallel.parameters import (
    DeclaringModule,
    ParameterSpec,
    declared_parameters,
    initialize_parameters_,
    local,
)
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from tests.parallel.groups import Part, part, slice_of, whole
from tests.rank_pool import ranks

E, F, H = 4, 8, 4
EXACT = 1e-12
UP = ParameterSpec((E, F, H), "normal", 1.0, split={"ep": 0, "etp": 1}, family="expert")
GAIN = ParameterSpec((E, H), "ones", split={"ep": 0}, family="expert")
DENSE = ParameterSpec((H, H), "normal", 1.0, split={"tp": 0})
# (ranks, degrees): dense and expert weights are laid out over the same ranks in two ways
LAYOUTS = [
    (2, {"expert": 2}),
    (4, {"expert": 2}),
    (4, {"expert": 4}),
    (4, {"tensor": 2, "expert": 2}),
    (4, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    (4, {"expert": 2, "replicate": 2}),
    (4, {"expert": 1, "expert_tensor": 2}),
]


class Experts(DeclaringModule):
    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.declare("up", UP, groups, torch.float64)
        self.declare("gain", GAIN, groups, torch.float64)

    def forward(self) -> Tensor:
        """The sum of squares of all local elements: different on ranks that hold different parts."""
        return (local(self.up) ** 2).sum() + (local(self.gain) ** 2).sum()


class Layer(DeclaringModule):
    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.declare("dense", DENSE, groups, torch.float64)
        self.experts = Experts(groups)

    def forward(self) -> Tensor:
        return (local(self.dense) ** 2).sum() + self.experts()


def built(degrees: dict[str, int], *, apart: bool = True) -> nn.Module:
    groups = ParallelState(RankGrid(dist.get_world_size(), **degrees)).collection()
    with torch.device("meta"):
        model = Layer(groups)
    dtypes = {"compute_dtype": torch.float64, "param_dtype": torch.float64}
    shard_model(model, [model.experts] if apart else [], groups, reshard_after_forward=True, **dtypes)
    model.to_empty(device="cpu")
    initialize_parameters_(model, seed=3)
    return model


def on_this_rank(degrees: dict[str, int]) -> tuple[dict[str, Part], dict[str, Tensor], Tensor]:
    """This rank's part of each weight, the unsharded gradients, and the squared norm over all ranks."""
    model = built(degrees)
    parts = {name: part(parameter) for name, parameter, _ in declared_parameters(model)}
    model().backward()
    squares = local_squared_norm(model.parameters())
    dist.all_reduce(squares)
    return parts, {name: whole(parameter.grad) for name, parameter, _ in declared_parameters(model)}, squares


@pytest.mark.parametrize(("num_ranks", "degrees"), LAYOUTS, ids=str)
def test_weights_gradients_and_their_norm_are_those_of_one_process(num_ranks, degrees):
    alone = Layer(ProcessGroupCollection.single())
    initialize_parameters_(alone, seed=3)
    want = {name: parameter.detach() for name, parameter, _ in declared_parameters(alone)}
    tensor, experts = degrees.get("tensor", 1), degrees.get("expert", 1) * degrees.get("expert_tensor", 1)
    experts *= 1 if "expert_tensor" in degrees else tensor
    copies = {"dense": num_ranks // tensor, "experts.up": num_ranks // experts, "experts.gain": num_ranks // experts}
    for parts, gradients, squares in ranks(num_ranks, on_this_rank, degrees):
        for name, (ranges, values) in parts.items():
            assert torch.equal(values, slice_of(want[name], ranges)), name
        for name, gradient in gradients.items():  # every data-parallel rank adds the same
            torch.testing.assert_close(gradient, 2 * copies[name] * want[name], rtol=EXACT, atol=EXACT)
        total = sum((2 * copies[name] * weight).square().sum() for name, weight in want.items())
        torch.testing.assert_close(squares, total, rtol=EXACT, atol=EXACT)


def refuse_a_unit_of_both_families() -> None:
    with pytest.raises(ShapeError, match=r"the model holds both dense and expert weights.*as a unit before it"):
        built({"expert": 2}, apart=False)


def test_a_unit_of_dense_and_expert_weights_is_refused():
    ranks(2, refuse_a_unit_of_both_families)
