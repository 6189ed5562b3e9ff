"""block: its layers in their order, then a norm; each layer drops elements of its own and has its own cache."""

import torch
from torch import Tensor

from megalith.numerics.dropout import DropoutKey
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.attention import KVCache
from megalith.transformer.block import TransformerBlock
from megalith.transformer.rotary import rotary_table
from tests.transformer.shapes import config, options

S, B, H, D = 6, 2, 16, 4


def built(**changes: object) -> TransformerBlock:
    block = TransformerBlock(config(num_layers=3, **changes), options())
    initialize_parameters_(block, seed=1)
    return block


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_it_runs_its_layers_in_order_and_then_the_norm():
    block = built()
    rotary = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    x = x_of()
    for layer in block.layers:
        x = layer(x, rotary, None, None, None)
    assert torch.equal(block.run_layers(x_of(), rotary, None, None, None), block.norm(x))
    assert len(block.layers) == 3


def test_no_two_dropouts_of_a_model_share_a_site():
    block = built(hidden_dropout=0.1, attention_dropout=0.1)
    first_sites = [layer.first_site for layer in block.layers]
    assert first_sites == [1, 4, 7]  # site 0 is the embedding's
    key = DropoutKey(1, 0, torch.arange(S * B).view(B, S))
    twin = block.layers[0]
    block.layers[1].load_state_dict(twin.state_dict())
    first, second = (layer(x_of(), None, None, key, None) for layer in block.layers[:2])
    assert not torch.equal(first, second), "layers of the same weights must drop other elements"


def test_each_layer_has_a_cache_of_its_own():
    block = built()
    caches = [KVCache() for _ in block.layers]
    outs = []
    for s in range(S):
        rotary = rotary_table(torch.arange(s, s + 1), D, 10000.0, torch.float64)
        outs.append(block.run_layers(x_of()[s : s + 1], rotary, None, None, caches))
    rotary = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    want = block.run_layers(x_of(), rotary, None, None, None)
    torch.testing.assert_close(torch.cat(outs), want, rtol=1e-12, atol=1e-12)
    assert [cache.num_tokens for cache in caches] == [S] * 3
    assert not torch.equal(caches[0].keys[0], caches[1].keys[0])
