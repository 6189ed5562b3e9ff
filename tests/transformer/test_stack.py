"""stack: layers in order, under global indices; each has its own dropout mask and its own cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megalith.config import RopeConfig, TransformerConfig
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import DropoutKey
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.mlp import MLP
from megalith.transformer.rotary import rotary_tables
from megalith.transformer.stack import LayerStack
from megalith.transformer.stage import Stage
from tests.transformer.shapes import config, options

S, B, H, D = 6, 2, 16, 4
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def built(indices: range = range(3), name: str = "layers", **changes: object) -> LayerStack:
    """A stack that a model holds under ``name``, with that model's weights and masks."""
    model = nn.ModuleDict({name: LayerStack(config(num_layers=3, **changes), options(), indices)})
    initialize_parameters_(model, seed=1)
    name_dropout_sites_(model)
    return model[name]


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def context_of(start: int = 0, end: int = S, **changes: object) -> LayerContext:
    return LayerContext(rotary=rotary_tables(torch.arange(start, end), D, RopeConfig(), torch.float64), **changes)


def dropping() -> LayerContext:
    key = DropoutKey(1, 0, torch.arange(S * B).view(B, S))
    return context_of(token_dropout_key=key, hidden_dropout_key=replace(key, tokens=key.tokens.t()))


def test_it_runs_its_layers_in_order():
    stack = built()
    x = x_of()
    for layer in stack.values():
        x = layer(x, context_of())
    assert torch.equal(stack(x_of(), context_of()), x)
    assert list(stack) == ["0", "1", "2"]


def test_its_names_are_global_indices():
    stack = built(range(2, 4))
    assert list(stack) == ["2", "3"]
    names = [name for name, _ in nn.ModuleDict({"layers": stack}).named_parameters()]
    assert names[0] == "layers.2.input_layernorm.weight"
    assert {name.split(".")[1] for name in names} == {"2", "3"}


@pytest.mark.parametrize("changes", [{"hidden_dropout": 0.1}, {"attention_dropout": 0.1}], ids=str)
def test_no_two_layers_drop_the_same_elements(changes):
    stack = built(**changes)
    stack["1"].load_state_dict(stack["0"].state_dict())
    first, second = (stack[index](x_of(), dropping()) for index in "01")
    assert not torch.equal(first, second), "layers of the same weights must drop other elements"
    assert torch.equal(*(stack[index](x_of(), context_of()) for index in "01"))


def test_all_dropouts_of_a_layer_draw_masks_of_their_own():
    numbers = [module.number for module in built(**DROPS).modules() if hasattr(module, "number")]
    assert len(set(numbers)) == len(numbers) == 3 * 3


def test_two_stacks_of_other_names_drop_other_elements():
    encoder, decoder = built(name="encoder", **DROPS), built(name="decoder", **DROPS)
    decoder.load_state_dict(encoder.state_dict())
    assert not torch.equal(encoder(x_of(), dropping()), decoder(x_of(), dropping()))
    assert torch.equal(encoder(x_of(), context_of()), decoder(x_of(), context_of()))


def test_each_layer_has_a_cache_of_its_own():
    stack = built(range(1, 4))
    caches = {index: KVCache(S) for index in (3, 2, 1)}
    outs = [stack(x_of()[s : s + 1], context_of(s, s + 1), caches) for s in range(S)]
    want = stack(x_of(), context_of())
    torch.testing.assert_close(torch.cat(outs), want, rtol=1e-12, atol=1e-12)
    assert [cache.num_tokens for cache in caches.values()] == [S] * 3
    keys = stack["2"].self_attn.k_proj(stack["2"].input_layernorm(stack["1"](x_of(), context_of())))
    assert caches[2].held[0].shape == (S, B, 2, D)
    torch.testing.assert_close(caches[2].held[0][0], keys[0].view(B, 2, D), rtol=1e-12, atol=1e-12)  # not rotated at 0


class Doubled(nn.Module):
    """A feed-forward without weights."""

    def __init__(self, settings: TransformerConfig, build: BuildOptions) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        return 2.0 * x


def test_each_layer_is_made_of_what_its_index_asks_for():
    asked: list[int] = []

    def spec_of(index: int) -> LayerSpec:
        asked.append(index)
        return LayerSpec(feed_forward=Doubled) if index == 3 else LayerSpec()

    stack = LayerStack(config(), options(), range(2, 5), spec_of)
    assert asked == [2, 3, 4]
    assert [type(layer.mlp) for layer in stack.values()] == [MLP, Doubled, MLP]
    initialize_parameters_(stack, seed=1)
    layer, context = stack["3"], context_of()
    h = x_of() + layer.self_attn(layer.input_layernorm(x_of()), context)
    assert torch.equal(layer(x_of(), context), h + 2.0 * layer.post_attention_layernorm(h))
    assert stack(x_of(), context).isfinite().all()


def four_layers(stage: Stage | None = None) -> GPTModel:
    return GPTModel(config(num_layers=4, **DROPS), options(), stage=stage, seed=1)


def test_a_stage_has_bitwise_the_weights_and_dropout_masks_of_its_layers_in_the_whole():
    whole, stage = four_layers(), four_layers(Stage(2, 4, has_embedding=False, has_head=True))
    names = {name for name, _ in stage.named_parameters()}
    layers = {name for name, _ in whole.named_parameters() if name.startswith(("model.layers.2.", "model.layers.3."))}
    assert names == layers | {"model.norm.weight", "lm_head.weight"}
    for name in names:
        assert torch.equal(stage.get_parameter(name), whole.get_parameter(name)), name

    tokens, key = torch.zeros(B, S, dtype=torch.int64), DropoutKey(5, 3, torch.arange(B * S).view(B, S))
    into: list[Tensor] = []
    whole.layers()[2].register_forward_pre_hook(lambda layer, args: into.append(args[0].detach()))
    want = whole(tokens, dropout_key=key)
    assert torch.equal(stage(tokens, dropout_key=key, hidden=into[0]), want)
    assert not torch.allclose(stage(tokens, dropout_key=replace(key, step=4), hidden=into[0]), want)
