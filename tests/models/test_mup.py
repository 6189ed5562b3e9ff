"""muP: the paper's table, and its claim that activations change by the same amount at any width."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import OptimConfig, TransformerConfig
from megalith.models.gpt_model import GPTModel
from megalith.optim.build import build_optimizer
from megalith.optim.optimizer_param_scheduler import OptimizerParamScheduler
from megalith.optim.rate_factors import multiply_rates_
from megalith.parallel.parameters import declared_parameters
from megalith.transformer.mup import rate_factors
from tests.tiny_run import VOCAB

BASE = 64
HEAD = 16
WIDTHS = [64, 128, 256]
STEPS = 3
FLAT = 0.15  # an exponent that three widths cannot distinguish from 0
RATES = OptimConfig(lr=0.01, min_lr=0.001, weight_decay=0.1, schedule="constant", adamw={"eps": 1e-8})


def config(width: int, *, mup: bool = True, heads: int | None = None, **settings: Any) -> TransformerConfig:
    """Heads of a fixed size; or ``heads`` of growing size."""
    base = {"base_hidden_size": BASE} | ({} if heads is None else {"base_kv_channels": BASE // heads})
    heads = heads or width // HEAD
    return TransformerConfig(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=width,
        ffn_hidden_size=2 * width,
        num_attention_heads=heads,
        init_method_std=0.1,
        mup=base if mup else None,
        **settings,
    )


def built(c: TransformerConfig) -> tuple[GPTModel, Any]:
    """A model in float64, and its optimizer as a run creates it."""
    model = GPTModel(c, seed=1).double()
    declared = list(declared_parameters(model))
    optimizer = build_optimizer([(name, parameter) for name, parameter, _ in declared], RATES)
    if c.mup is not None:
        multiply_rates_(optimizer, rate_factors(declared, c), RATES)
    OptimizerParamScheduler.from_config(optimizer, RATES, steps=100)
    return model, optimizer


def activations(model: GPTModel, tokens: Tensor) -> dict[str, Tensor]:
    """The outputs of the modules in each layer, the last norm and the head."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, arguments, output: found.update({name: output.detach()})

    parts = {name: part for name, part in model.named_modules() if name.endswith(("self_attn", "mlp", "model.norm"))}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    with torch.no_grad():
        found["logits"] = model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def changes(c: TransformerConfig) -> dict[str, float]:
    """How far a coordinate of each activation has moved after some steps, on average."""
    model, optimizer = built(c)
    if model.lm_head.weight is not None:
        nn.init.zeros_(model.lm_head.weight)
    tokens, labels = torch.randint(VOCAB, (2, 4, 16), generator=torch.Generator().manual_seed(1))
    before = activations(model, tokens)
    for _ in range(STEPS):
        model(tokens, labels=labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = activations(model, tokens)
    return {name: float((after[name] - x).abs().mean()) for name, x in before.items()}


def exponents(**settings: Any) -> dict[str, float]:
    """The exponent with which each of ``changes`` grows with the width, by least squares over the doublings."""
    sizes = [changes(config(width, **settings)) for width in WIDTHS]
    steps = torch.arange(len(WIDTHS)).double()
    steps -= steps.mean()
    found = {}
    for name in sizes[0]:
        logs = torch.tensor([math.log2(size[name]) for size in sizes], dtype=torch.float64)
        found[name] = float((steps * logs).sum() / (steps * steps).sum())
    return found


# an untied output projection starts at 0 (appendix D.2); with a tied one, the random logits shrink with the width
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "heads that grow": {"heads": 4},
    "norms around, biases": {"residual": {"norm_placement": "sandwich"}, "add_bias_linear": True},
    "experts": {"moe": {"num_experts": 4, "top_k": 2, "shared_ffn_hidden_size": 32, "shared_expert_gate": True}},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "untied" else [pytest.mark.slow]) for c in CASES])
def test_activations_change_by_the_same_amount_at_any_width(case):
    for name, exponent in exponents(**CASES[case]).items():
        assert (-0.5 if case == "tied" else -FLAT) < exponent < FLAT, (name, exponent)


def test_without_mup_wider_models_change_more():
    found = exponents(mup=False)
    assert all(found[name] > 0.4 for name in found if name != "model.norm"), found


def test_the_table_of_the_paper_at_four_times_the_width():
    experts = {"num_experts": 4, "top_k": 2, "layers": [False, True], "shared_ffn_hidden_size": 32}
    c = config(4 * BASE, moe=experts | {"shared_expert_gate": True}, add_bias_linear=True)
    model, optimizer = built(c)
    rates = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    into_the_residual_stream = ("o_proj", "down_proj")
    for name, parameter, spec in declared_parameters(model):
        group = rates[id(parameter)]
        if parameter.dim() == 1 or name.endswith("bias"):
            assert (group["lr"], group["min_lr"], group["eps"], group["weight_decay"]) == (0.01, 0.001, 2.5e-9, 0.0)
            continue
        std, lr, eps = 0.5, 0.25, 0.25
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            std, lr, eps = 1.0, 1.0, 0.25
        elif name in ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_experts.gate.weight"):
            std, lr, eps = 0.25, 0.25, 1.0
        deviation = 0.1 * std / (2.0 if any(part in name for part in into_the_residual_stream) else 1.0)  # sqrt(2 L)
        assert spec.std == pytest.approx(deviation), name
        assert parameter.std().item() == pytest.approx(deviation, rel=5 / (2 * parameter.numel()) ** 0.5), name
        assert group["lr"] == pytest.approx(0.01 * lr), name
        assert group["min_lr"] == pytest.approx(0.001 * lr), name
        assert group["eps"] == pytest.approx(1e-8 * eps), name
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.01 * 0.1), name
    assert c.logits_multiplier == 0.25
    assert config(4 * BASE).attention_scale is None
    assert config(4 * BASE, heads=4).attention_scale == pytest.approx(0.25 / 4)  # 1/sqrt(16) of 16, times 16/64


def test_at_the_base_it_is_the_standard_parametrization():
    (mup, of_mup), (standard, of_standard) = (built(config(BASE, mup=mup)) for mup in (True, False))
    assert all(torch.equal(got, want) for got, want in zip(mup.parameters(), standard.parameters(), strict=True))
    tokens = torch.arange(20).view(2, 10)
    assert torch.equal(mup(tokens), standard(tokens))
    rates = [{(g["lr"], g["weight_decay"], g["eps"]) for g in each.param_groups} for each in (of_mup, of_standard)]
    assert rates[0] == rates[1]


def test_every_gradient_shrinks_with_the_width_and_eps_with_it():
    sizes = {}
    for width in (BASE, 4 * BASE):
        model, _ = built(config(width))
        tokens, labels = torch.randint(VOCAB, (2, 4, 16), generator=torch.Generator().manual_seed(1))
        model(tokens, labels=labels).mean().backward()
        sizes[width] = {name: float(p.grad.square().mean().sqrt()) for name, p in model.named_parameters()}
    for name, size in sizes[BASE].items():
        assert 4**0.5 < size / sizes[4 * BASE][name] < 4**1.5, name


def test_an_override_of_the_user_is_of_the_base_too():
    c = config(4 * BASE)
    model = GPTModel(c)
    declared = list(declared_parameters(model))
    rates = OptimConfig(
        lr=0.01, schedule="constant", adamw={}, overrides=[{"match": "*q_proj*", "max_lr": 0.04, "wd_mult": 0.5}]
    )
    optimizer = build_optimizer([(name, p) for name, p, _ in declared], rates)
    multiply_rates_(optimizer, rate_factors(declared, c), rates)
    OptimizerParamScheduler.from_config(optimizer, rates, steps=100)
    [q_proj] = (
        g
        for g in optimizer.param_groups
        if any(p is model.model.layers["0"].self_attn.q_proj.weight for p in g["params"])
    )
    assert q_proj["max_lr"] == pytest.approx(0.01)
    assert q_proj["wd_mult"] == pytest.approx(2.0)
