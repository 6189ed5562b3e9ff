"""Multi-token prediction modules: losses and gradients against a formula in plain torch, names, and their callers."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu

from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import parameter_shapes
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.layer_spec import LayerSpec, layer_specs
from megalith.transformer.stage import Stage
from tests.transformer.shapes import config, options

B, S, V, M = 2, 8, 31, 2
EXACT = 1e-11
MTP = {"mtp": {"num_modules": M}}


def built(**changes: Any) -> GPTModel:
    model = GPTModel(config(**MTP | changes), options(), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # weights start at one, which would hide mistakes
                parameter.add_(torch.linspace(-0.2, 0.3, parameter.numel()) * len(name) / 20.0)
    return model


def tokens(seed: int = 1, *shape: int) -> Tensor:
    return torch.randint(V, (*shape, B, S), generator=torch.Generator().manual_seed(seed))


def rotated(x: Tensor, base: float) -> Tensor:
    """Applies rotary positions 0, 1, 2 ... to [B, A, S, D], as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None].double() * base ** (-torch.arange(half).double() / half)
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((y.real, y.imag), dim=-1)


def by_formula(c: TransformerConfig, w: dict[str, Tensor], rows: Tensor, labels: Tensor, sees: Tensor) -> Tensor:
    """Losses [1+M, B, S] of ``rows`` [B, S], whose ``labels`` are [1+M, B, S]; ``sees`` is bool [B, S, S]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c.layernorm_epsilon)

    def layer(x: Tensor, index: int) -> Tensor:
        name = f"model.layers.{index}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (linear(h, w[f"{name}.self_attn.{n}_proj.weight"]).unflatten(2, (-1, c.kv_channels)) for n in "qkv")
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, A or G, S, D]
        q, k = rotated(q, c.rope.base), rotated(k, c.rope.base)
        attended = scaled_dot_product_attention(q, k, v, sees[:, None], enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + linear(attended, w[f"{name}.self_attn.o_proj.weight"])
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (linear(h, w[f"{name}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return x + linear(silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])

    def losses(x: Tensor, target: Tensor) -> Tensor:
        head = w["model.embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]
        return cross_entropy(linear(x, head).flatten(0, 1), target.flatten(), reduction="none").view(B, S)

    x = embedding(rows, w["model.embed_tokens.weight"])
    for index in range(c.num_layers):
        x = layer(x, index)
    x = norm(x, "model.norm")
    found = [losses(x, labels[0])]
    for depth in range(1, M + 1):
        index = c.num_layers + depth - 1
        name = f"model.layers.{index}"
        ahead = embedding(labels[depth - 1], w["model.embed_tokens.weight"])
        both = torch.cat((norm(ahead, f"{name}.enorm"), norm(x, f"{name}.hnorm")), dim=-1)
        x = norm(layer(linear(both, w[f"{name}.eh_proj.weight"]), index), f"{name}.shared_head.norm")
        found.append(losses(x, labels[depth]))
    return torch.stack(found)


@pytest.mark.parametrize("fused", [False, True], ids=["of logits", "fused with the projection"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("lengths", [None, [[3, 5], [8]]], ids=["one document", "packed"])
def test_losses_of_every_depth_and_every_gradient_are_those_of_the_formula(lengths, tied, fused):
    model = built(tie_word_embeddings=tied)
    model.options = options(fused_linear_cross_entropy=fused)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    labels, sees = tokens(2, 1 + M), torch.ones(B, S, S).tril().bool()
    packed = None
    if lengths is not None:
        packed = PackedSeqParams.from_lengths(lengths)
        documents = packed.document_ids()
        sees &= documents[:, :, None] == documents[:, None, :]
    want = by_formula(model.config, weights, tokens(), labels, sees)
    got = model(tokens(), labels=labels, packed_seq_params=packed)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    dy = torch.linspace(-1.0, 1.0, want.numel()).double().view_as(want)
    got.backward(dy)
    want.backward(dy)
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_without_labels_further_ahead_the_model_is_bitwise_the_one_without_modules(shape):
    drops = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    key = DropoutKey(3, 0, torch.arange(B * S).view(B, S))
    plain, model = (GPTModel(config(shape, **drops, **more), options(), seed=1) for more in ({}, MTP))
    want = plain(tokens(), labels=tokens(2), dropout_key=key)
    assert torch.equal(model(tokens(), labels=tokens(2), dropout_key=key), want)
    assert torch.equal(
        model(tokens(), labels=tokens(2, 1 + M), dropout_key=key)[0],
        plain(tokens(), labels=tokens(2, 1 + M)[0], dropout_key=key),
    )
    assert torch.equal(model(tokens(), dropout_key=key), plain(tokens(), dropout_key=key))


def test_a_stage_with_the_head_has_the_modules_and_the_embedding_and_gives_the_losses_of_the_whole():
    labels = tokens(2, 1 + M)
    whole = built()
    first, last = (
        GPTModel(whole.config, options(), stage=Stage(index, index + 1, index == 0, index == 1), seed=1)
        for index in range(2)
    )
    for part in (first, last):
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    assert torch.equal(
        last(tokens(), labels=labels, hidden=first(tokens(), labels=labels)), whole(tokens(), labels=labels)
    )
    [embedding], [copy] = first.shared_weights(), last.shared_weights()
    assert torch.equal(embedding, copy)
    assert (first.copied_weights(), [each is copy for each in last.copied_weights()]) == ([], [True])
    assert whole.shared_weights() == []
    assert [f"model.layers.{index}" for index in (1, 2, 3)] == [
        name for layer in last.layers() for name, module in last.named_modules() if module is layer
    ]


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_names_are_those_of_deepseek_v3s_weights(shape):
    model = GPTModel(config(shape, **MTP))
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == parameter_shapes(model.config)
    names = {name.removeprefix("model.layers.3.") for name in parameter_shapes(config(**MTP)) if ".layers.3." in name}
    layer = {name.removeprefix("model.layers.0.") for name in parameter_shapes(config()) if ".layers.0." in name}
    assert names - layer == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert names > layer


def test_weights_and_dropout_masks_of_modules_are_of_their_own():
    model = built()
    weights = [model.get_parameter(f"model.layers.{index}.mlp.up_proj.weight") for index in range(2 + M)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))
    numbers = [model.get_submodule(f"model.layers.{index}.mlp_dropout").number for index in range(2 + M)]
    assert len(set(numbers)) == 2 + M


def test_modules_are_of_the_specs_of_the_indices_that_follow():
    asked: list[int] = []

    def spec_of(index: int) -> LayerSpec:
        asked.append(index)
        return layer_specs(config())(index)

    GPTModel(config(**MTP), options(), spec_of=spec_of)
    assert asked == [0, 1, 2, 3]


def test_generation_runs_no_module():
    model = built().eval()
    for layer in model.layers()[-M:]:
        layer.forward = None  # calling it raises
    plain = GPTModel(config(), options(), seed=1).eval()
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    assert model.new_caches(8).keys() == {0, 1}
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=0.0, atol=0.0)


def test_labels_of_another_number_of_depths_are_refused():
    with pytest.raises(ShapeError, match=r"must have 3 entries in dimension 0, .*; got 2"):
        built()(tokens(), labels=tokens(2, 2))
