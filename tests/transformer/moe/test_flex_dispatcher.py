"""Experts behind a fused exchange (a stand-in with DeepEP's interface) compute what one process does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.config import DispatchConfig, TransformerConfig
from megalith.errors import ConfigError, MissingDependencyError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.expert.fused_a2a import FusedA2A, deep_ep_buffer
from megalith.parallel.parameters import initialize_parameters_
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.moe_layer import MoELayer
from tests.parallel.expert.standin import StandInBuffer
from tests.parallel.groups import collection
from tests.rank_pool import ranks

S, B, H, E = 6, 2, 16, 8
FLEX = DispatchConfig(method="flex")


def layer(options: BuildOptions, **moe: Any) -> MoELayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        ffn_hidden_size=24,
        moe={"num_experts": E, "top_k": 3, **moe},
    )
    made = MoELayer(config, options, layer=0)
    initialize_parameters_(made, 5)
    return made


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def results(made: MoELayer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.requires_grad_()
    y = made(x, LayerContext())
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    grads = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in made.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def on_ranks(ep: int, moe: dict[str, Any], max_rows: float | None) -> dict[str, torch.Tensor]:
    groups, dispatch = collection(expert=ep), DispatchConfig(method="flex", max_rows=max_rows)
    options = BuildOptions(
        groups, torch.float64, dispatch=dispatch, fused_a2a=FusedA2A(groups.ep, StandInBuffer(groups.ep))
    )
    return results(layer(options, **moe), rows_of(dist.get_rank()))


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("moe", "max_rows"),
    [({}, None), ({"capacity": {"factor": 0.5}}, None), ({"shared_ffn_hidden_size": 8}, None), ({}, 0.4)],
    ids=["dropless", "dropping", "shared", "in turns"],
)
def test_every_rank_gives_what_one_process_gives(ep, moe, max_rows):
    alone = [
        results(layer(BuildOptions(ProcessGroupCollection.single(), torch.float64), **moe), rows_of(rank))
        for rank in range(ep)
    ]
    for rank, found in enumerate(ranks(ep, on_ranks, ep, moe, max_rows)):
        torch.testing.assert_close(found["y"], alone[rank]["y"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["dx"], alone[rank]["dx"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["gate.weight"], alone[rank]["gate.weight"], rtol=1e-12, atol=1e-12)
        mine = slice(rank * E // ep, (rank + 1) * E // ep)
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            want = sum(each[name][mine] for each in alone)  # all tokens that were sent to these experts
            torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


def test_alone_nothing_travels():
    options = BuildOptions(ProcessGroupCollection.single(), torch.float64)
    flex, plain = (results(layer(each), rows_of(0)) for each in (replace(options, dispatch=FLEX), options))
    for name, want in plain.items():
        torch.testing.assert_close(flex[name], want, rtol=1e-12, atol=1e-12)


def without_an_exchange() -> str:
    with pytest.raises(ConfigError) as caught:
        layer(BuildOptions(collection(expert=2), torch.float64, dispatch=FLEX))
    return str(caught.value)


def test_without_an_exchange_it_is_refused():
    assert all("pass one, or use all_to_all" in message for message in ranks(2, without_an_exchange))


def test_without_deep_ep_the_error_says_where_it_is_from():
    with pytest.raises(MissingDependencyError, match=r"parallel.dispatch.method=flex needs deep_ep.*build it"):
        deep_ep_buffer(None, 1024)
