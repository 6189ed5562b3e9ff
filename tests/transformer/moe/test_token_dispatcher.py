"""token_dispatcher: experts on several ranks match loops over all tokens, whatever each rank sends."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.config import DispatchConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import local
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.moe_layer import MoELayer
from tests.rank_pool import ranks
from tests.transformer.moe.layers import layer_of, mixture, rows_of, weights_of

H, E = 16, 8
EXACT = 1e-10  # section 16.2 of the specification
UNEVEN = [13, 0, 5, 1]  # tokens on each rank
EVEN = [6, 6, 6, 6]
SIGMOID = {"score_function": "sigmoid", "bias": True}
BIASED = {"mlp_bias": True}
ALL_TO_ALL = {"method": "all_to_all"}
# ranks, degrees of expert and expert_tensor, dispatch, tokens on each rank, whether all go to one expert
CASES: list[tuple[int, tuple[int, int], dict[str, Any], list[int], bool]] = [
    (2, (2, 1), ALL_TO_ALL, UNEVEN, False),
    (2, (2, 1), {"method": "all_gather"}, EVEN, False),
    (2, (2, 1), {"max_rows": 0.4}, UNEVEN, False),
    (4, (2, 2), ALL_TO_ALL, UNEVEN, False),
    (4, (2, 2), {"method": "all_gather"}, EVEN, True),
    (4, (4, 1), ALL_TO_ALL, UNEVEN, True),
    (4, (4, 1), {"method": "all_gather"}, EVEN, False),
    (4, (2, 2), {"max_rows": 0.4}, UNEVEN, True),
    (4, (1, 4), ALL_TO_ALL, UNEVEN, False),
    (2, (2, 1), {"method": "all_gather", "max_rows": 0.4}, EVEN, False),
]
IN_MAKE_TEST = (0, 1, 2, 3, 5, 9)


def groups_of(expert: int, expert_tensor: int) -> ProcessGroupCollection:
    grid = RankGrid(dist.get_world_size(), expert=expert, expert_tensor=expert_tensor)
    return ParallelState(grid).collection()


def layer_on_ranks(degrees: tuple[int, int], dispatch: dict[str, Any], **moe: Any) -> MoELayer:
    """A layer over all ranks, which differ only in their tokens."""
    build = BuildOptions(groups_of(*degrees), torch.float64, dispatch=DispatchConfig(**dispatch))
    return layer_of(build, num_experts=E, **moe)


def settings_of(to_one: bool) -> dict[str, Any]:
    return {"top_k": 1, "router": SIGMOID} if to_one else {"top_k": 3}


def send_all_to_one_(layer: MoELayer) -> None:
    if layer.gate.bias is not None:
        with torch.no_grad():
            local(layer.gate.bias)[6] = 30.0


def part_of(name: str, whole: Tensor, degrees: tuple[int, int], rank: int) -> Tensor:
    """This rank's part of a parameter of all experts."""
    (ep, etp), dim = degrees, 1 if name.endswith("down_proj_bias") else 2  # biases of outputs, or inner features
    return whole.chunk(ep)[rank // etp].chunk(etp, dim=dim)[rank % etp]


def draw_biases_(layer: MoELayer, degrees: tuple[int, int] = (1, 1), rank: int = 0) -> None:
    """Expert biases are initially zero, which would hide mistakes."""
    for number, (name, spec) in enumerate(layer.experts.parameter_specs.items()):
        if name.endswith("_bias"):
            with torch.no_grad():
                whole = rows_of(200 + number, *spec.shape)
                local(layer.experts.get_parameter(name)).copy_(part_of(name, whole, degrees, rank))


def tokens_of(counts: list[int], rank: int) -> Tensor:
    return rows_of(rank, counts[rank], 1, H)


def slopes_of(counts: list[int], rank: int) -> Tensor:
    return rows_of(100 + rank, counts[rank], 1, H)


def on_this_rank(
    degrees: tuple[int, int], dispatch: dict[str, Any], counts: list[int], to_one: bool
) -> dict[str, Tensor]:
    """Output and gradients on this rank; those of weights that all ranks have are summed over them."""
    layer, rank = layer_on_ranks(degrees, dispatch, shape=BIASED, **settings_of(to_one)), dist.get_rank()
    send_all_to_one_(layer)
    draw_biases_(layer, degrees, rank)
    x = tokens_of(counts, rank).requires_grad_()
    y = layer(x, LayerContext())
    (y * slopes_of(counts, rank)).sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = local(parameter.grad).clone() if hasattr(parameter.grad, "to_local") else parameter.grad
        if not name.startswith("experts."):
            dist.all_reduce(gradient)
        found[name] = gradient
    return found


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "dispatch", "counts", "to_one"),
    [pytest.param(*case, marks=() if n in IN_MAKE_TEST else pytest.mark.slow) for n, case in enumerate(CASES)],
    ids=str,
)
def test_experts_on_several_ranks_are_loops_over_the_tokens_of_all(num_ranks, degrees, dispatch, counts, to_one):
    alone = layer_of(num_experts=E, shape=BIASED, **settings_of(to_one))
    send_all_to_one_(alone)
    draw_biases_(alone)
    weights = weights_of(alone)
    inputs = [tokens_of(counts, rank).requires_grad_() for rank in range(num_ranks)]
    outputs = [mixture(x.view(-1, H), weights, alone.top_k, sigmoid=to_one).view(x.shape) for x in inputs]
    sum((y * slopes_of(counts, rank)).sum() for rank, y in enumerate(outputs)).backward()
    for rank, found in enumerate(ranks(num_ranks, on_this_rank, *(degrees, dispatch, counts, to_one))):
        want = {"y": outputs[rank].detach(), "dx": inputs[rank].grad}
        for name, weight in weights.items():
            of_experts = name.startswith("experts.")
            want[name] = part_of(name, weight.grad, degrees, rank) if of_experts else weight.grad
        torch.testing.assert_close(found, want, rtol=EXACT, atol=EXACT, msg=lambda text, rank=rank: f"{rank}: {text}")


def one_inside_the_other(degrees: tuple[int, int], dispatch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of two batches, one after the other, and the second nested within the first."""
    layer, found = layer_on_ranks(degrees, dispatch), []
    for nested in (False, True):
        a, b = (rows_of(10 * dist.get_rank() + n, 4, H).requires_grad_() for n in range(2))
        dispatcher, layer_grads = layer.dispatcher, []
        routed = [layer.gate(x.unsqueeze(1), LayerContext()) for x in (a, b)]
        if nested:
            sent = [dispatcher.send(x, routing) for x, routing in zip((a, b), routed, strict=True)]
            received = [dispatcher.receive(each) for each in sent]
            y_b = dispatcher.combine(layer.experts(*received[1][0]), received[1][1])
            y_a = dispatcher.combine(layer.experts(*received[0][0]), received[0][1])
        else:
            y_a, y_b = (dispatched(layer, x, routing) for x, routing in zip((a, b), routed, strict=True))
        layer.zero_grad()
        (y_a.square().sum() + 2.0 * y_b.square().sum()).backward()
        layer_grads = [local(p.grad).clone() if hasattr(p.grad, "to_local") else p.grad for p in layer.parameters()]
        found.append([y_a.detach(), y_b.detach(), a.grad, b.grad, *layer_grads])
    return found[0], found[1]


def dispatched(layer: MoELayer, x: Tensor, routing: Any) -> Tensor:
    rows, plan = layer.dispatcher.receive(layer.dispatcher.send(x, routing))
    return layer.dispatcher.combine(layer.experts(*rows), plan)


@pytest.mark.parametrize("dispatch", [ALL_TO_ALL, {"method": "all_gather"}], ids=str)
def test_two_batches_may_be_on_their_way_at_once(dispatch):
    for sequential, nested in ranks(2, one_inside_the_other, (2, 1), dispatch):
        torch.testing.assert_close(nested, sequential, rtol=EXACT, atol=EXACT)


def without_the_host(degrees: tuple[int, int], pad: bool) -> str | None:
    """The first read of a tensor's value on the host in a layer's forward and backward, or None."""
    layer = layer_on_ranks(degrees, ALL_TO_ALL, capacity={"factor": 1.25, "pad": pad})
    x = tokens_of(EVEN, dist.get_rank()).requires_grad_()
    read = []

    def noted(name: str) -> Any:
        original = getattr(Tensor, name)

        def read_value(self: Tensor, *arguments: Any) -> Any:
            read.append(name)
            return original(self, *arguments)

        return read_value

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__int__", "__index__", "__bool__", "__float__"):
            patch.setattr(Tensor, name, noted(name))
        y = layer(x, LayerContext())
        y.backward(torch.ones_like(y))
    return read[0] if read else None


@pytest.mark.parametrize("degrees", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_with_rows_of_a_fixed_number_the_host_reads_nothing_from_the_device(degrees):
    assert ranks(2, without_the_host, degrees, True) == [None, None]
    assert None not in ranks(2, without_the_host, degrees, False)  # it must know how many rows arrive
