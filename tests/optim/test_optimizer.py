"""optimizer: weight decay, overrides and their conflicts, torch's AdamW step by step, and the names of moments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import OptimConfig, ParamGroupOverride
from megalith.errors import ConfigError
from megalith.optim.build import build_optimizer
from megalith.optim.optimizer import Optimizer, parameter_groups
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, declared_parameters, initialize_parameters_
from megalith.parallel.sharding.fsdp import shard_model
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks

H, F = 8, 12
RATES = {"lr": 0.1, "adamw": {"betas": [0.8, 0.9], "eps": 1e-6}}
DECAY = 0.3


class Model(DeclaringModule):
    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        options = BuildOptions(groups, torch.float64)
        self.up = ColumnParallelLinear(H, F, options, bias=True, std=0.5)
        self.norm = nn.ModuleDict({"inner": ColumnParallelLinear(F, F, options, bias=False, std=0.5)})
        self.down = RowParallelLinear(F, H, options, bias=True, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def config(*overrides: dict[str, Any]) -> OptimConfig:
    return OptimConfig(**RATES, overrides=overrides)


def single() -> Model:
    model = Model(ProcessGroupCollection.single())
    initialize_parameters_(model, seed=1)
    return model


def built_for(model: nn.Module) -> Optimizer:
    return build_optimizer(((name, parameter) for name, parameter, _ in declared_parameters(model)), config())


def settings_of(model: nn.Module, *overrides: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each parameter, the settings of its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model.named_parameters(), [ParamGroupOverride(**override) for override in overrides])
    settings = {}
    for group in groups:
        members = group.pop("params")
        settings |= {names[id(member)]: group for member in members}
    assert len(settings) == len(names)
    return settings


def test_norms_and_biases_do_not_decay_and_matrices_do():
    assert settings_of(single()) == {
        "up.weight": {"wd_mult": 1.0},
        "up.bias": {"wd_mult": 0.0},
        "norm.inner.weight": {"wd_mult": 1.0},
        "down.weight": {"wd_mult": 1.0},
        "down.bias": {"wd_mult": 0.0},
    }


def test_what_shares_settings_is_one_group():
    groups = parameter_groups(single().named_parameters(), [])
    assert [(len(group["params"]), group["wd_mult"]) for group in groups] == [(3, 1.0), (2, 0.0)]


def test_an_override_sets_what_it_names_for_what_it_matches():
    got = settings_of(single(), {"match": "down.*", "max_lr": 0.5, "min_lr": 0.05}, {"match": "*.bias", "wd_mult": 2.0})
    assert got["up.weight"] == {"wd_mult": 1.0}
    assert got["up.bias"] == {"wd_mult": 2.0}
    assert got["down.weight"] == {"wd_mult": 1.0, "max_lr": 0.5, "min_lr": 0.05}
    assert got["down.bias"] == {"wd_mult": 2.0, "max_lr": 0.5, "min_lr": 0.05}


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("*.bias", {"up.bias", "down.bias"}),
        ("up.*", {"up.weight", "up.bias"}),
        ("*", {"up.weight", "up.bias", "norm.inner.weight", "down.weight", "down.bias"}),
        ("[ud]*.weight", {"up.weight", "down.weight"}),
        ("norm.inner.weight", {"norm.inner.weight"}),
        ("??.bias", {"up.bias"}),
    ],
)
def test_patterns_are_of_the_shell_and_over_the_whole_name(pattern, matched):
    got = settings_of(single(), {"match": pattern, "max_lr": 9.0})
    assert {name for name, settings in got.items() if "max_lr" in settings} == matched


def test_overrides_that_agree_or_speak_of_other_fields_may_overlap():
    got = settings_of(single(), {"match": "up.*", "max_lr": 0.5}, {"match": "up.bias", "max_lr": 0.5, "wd_mult": 1.0})
    assert got["up.bias"] == {"wd_mult": 1.0, "max_lr": 0.5}


def test_overrides_that_disagree_are_refused():
    with pytest.raises(
        ConfigError, match=r"disagree on max_lr of up\.bias: 'up\.\*' sets 0\.5, '\*\.bias' sets 0\.25; make one"
    ):
        settings_of(single(), {"match": "up.*", "max_lr": 0.5}, {"match": "*.bias", "max_lr": 0.25})
    with pytest.raises(ConfigError, match=r"disagree on wd_mult of down\.weight"):
        settings_of(single(), {"match": "down.weight", "wd_mult": 0.0}, {"match": "*", "wd_mult": 1.0})


def test_overrides_that_match_nothing_are_refused_all_at_once():
    with pytest.raises(ConfigError, match=r"match no parameter: bias, embed\*; patterns must match whole names"):
        settings_of(single(), {"match": "embed*", "max_lr": 1.0}, {"match": "bias", "max_lr": 1.0}, {"match": "*.bias"})


def decay_as_the_scheduler_would(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = DECAY * group["wd_mult"]


def train(model: nn.Module, optimizer: Optimizer | torch.optim.Optimizer, x: Tensor, steps: int = 4) -> None:
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def x_of() -> Tensor:
    return torch.randn(4, 1, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained_by_torch() -> dict[str, Tensor]:
    """Weights after four steps of torch.optim.AdamW over plain tensors."""
    model = single()
    parameters = dict(model.named_parameters())
    del parameters["norm.inner.weight"]  # no gradient reaches it
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() == 2], "weight_decay": DECAY},
            {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
        foreach=False,
    )
    train(model, theirs, x_of())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_one_process_follows_torchs_adamw():
    model = single()
    optimizer = built_for(model)
    decay_as_the_scheduler_would(optimizer)
    train(model, optimizer, x_of())
    for name, want in trained_by_torch().items():
        torch.testing.assert_close(model.get_parameter(name).detach(), want, rtol=1e-12, atol=1e-12)


def trained_in_layout(tensor: int, replicate: int) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Weights after four steps, and the shape of this rank's part of each moment."""
    groups = collection(tensor, replicate)
    model = Model(groups)
    dtypes = {"compute_dtype": torch.float64, "param_dtype": torch.float64}
    shard_model(model, [], groups, reshard_after_forward=False, **dtypes)
    initialize_parameters_(model, seed=1)
    optimizer = built_for(model)
    decay_as_the_scheduler_would(optimizer)
    train(model, optimizer, x_of().chunk(groups.size("dp"))[groups.rank("dp")])
    moments = {name: tuple(moment.to_local().shape) for name, moment in optimizer.tensors().items()}
    return {name: whole(parameter) for name, parameter in model.named_parameters()}, moments


@pytest.mark.parametrize(("num_ranks", "tensor", "replicate"), [(2, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_every_layout_follows_it_too_and_holds_moments_of_its_own_shards(num_ranks, tensor, replicate):
    want = trained_by_torch()
    shards = num_ranks // tensor // replicate
    for weights, moments in ranks(num_ranks, trained_in_layout, tensor, replicate):
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
        held = torch.Size(moments["optimizer.exp_avg.up.weight"]).numel()
        assert held == F * H // (tensor * shards)


def test_moments_are_named_after_their_parameters_and_there_from_the_start():
    model = single()
    optimizer = built_for(model)
    tensors = optimizer.tensors()
    names = [name for name, _ in model.named_parameters()]
    assert tensors.keys() == {f"optimizer.{m}.{n}" for m in ("exp_avg", "exp_avg_sq") for n in names}
    assert all((tensor == 0.0).all() for tensor in tensors.values())
    train(model, optimizer, x_of(), steps=1)
    after = optimizer.tensors()
    assert after["optimizer.exp_avg.up.weight"] is tensors["optimizer.exp_avg.up.weight"], "filled in place"
    assert (after["optimizer.exp_avg.up.weight"] != 0.0).any()


def test_an_optimizer_goes_on_from_moments_and_a_number_of_updates():
    model, resumed = single(), single()
    optimizer, other = built_for(model), built_for(resumed)
    train(model, optimizer, x_of(), steps=2)
    resumed.load_state_dict(model.state_dict())
    for name, moment in other.tensors().items():
        moment.copy_(optimizer.tensors()[name])
    other.set_num_updates_(2)
    train(model, optimizer, x_of(), steps=2)
    train(resumed, other, x_of(), steps=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name
