"""sgd: torch's SGD on plain tensors, step by step, in layouts; named state, and no state without momentum."""

import pytest
import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.build import build_optimizer
from megalith.parallel.parameters import initialize_parameters_
from megalith.parallel.sharding.fsdp import shard_model
from tests.optim.test_optimizer import Model, decay_as_the_scheduler_would, single, train, x_of
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks

DECAY = 0.3
SETTINGS = [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5}, {"momentum": 0.0}]


def config(settings: dict[str, object]) -> OptimConfig:
    return OptimConfig(name="sgd", lr=0.01, sgd=settings)


def by_torch(settings: dict[str, object]) -> dict[str, Tensor]:
    """Weights after four steps of torch.optim.SGD over plain tensors."""
    model = single()
    parameters = dict(model.named_parameters())
    del parameters["norm.inner.weight"]  # no gradient reaches it
    groups = [
        {"params": [p for p in parameters.values() if p.dim() == 2], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    train(model, torch.optim.SGD(groups, lr=0.01, foreach=False, **settings), x_of())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def in_layout(settings: dict[str, object], tensor: int) -> dict[str, Tensor]:
    groups = collection(tensor)
    model = Model(groups)
    dtypes = {"compute_dtype": torch.float64, "param_dtype": torch.float64}
    shard_model(model, [], groups, reshard_after_forward=False, **dtypes)
    initialize_parameters_(model, seed=1)
    optimizer = build_optimizer(model.named_parameters(), config(settings))
    decay_as_the_scheduler_would(optimizer)
    train(model, optimizer, x_of().chunk(groups.size("dp"))[groups.rank("dp")])
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_layout_follows_torchs_sgd(settings):
    want = by_torch(settings)
    for num_ranks, tensor in ((1, 1), (2, 1), (4, 2)):
        for weights in ranks(num_ranks, in_layout, settings, tensor):
            for name, value in want.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)


def test_its_state_is_a_buffer_for_each_parameter_and_goes_on_where_it_was():
    model, resumed = single(), single()
    optimizer, other = (build_optimizer(each.named_parameters(), config(SETTINGS[0])) for each in (model, resumed))
    assert optimizer.tensors().keys() == {f"optimizer.momentum_buffer.{name}" for name, _ in model.named_parameters()}
    train(model, optimizer, x_of(), steps=2)
    resumed.load_state_dict(model.state_dict())
    for name, buffer in other.tensors().items():
        buffer.copy_(optimizer.tensors()[name])
    other.set_num_updates_(2)
    train(model, optimizer, x_of(), steps=2)
    train(resumed, other, x_of(), steps=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_without_momentum_there_is_no_state():
    assert build_optimizer(single().named_parameters(), config({"momentum": 0.0})).tensors() == {}
