"""gpt_model: dropout and scale of the embedding, scale and softcap of the logits, the dtype in between."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import dropout, name_number
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.layer_context import LayerContext
from tests.models.test_gpt_model import EXACT, B, S, built, key, tokens
from tests.transformer.shapes import config, options


def test_the_embedding_drops_a_share_of_its_own():
    sites = {
        name: module.p
        for name, module in built(hidden_dropout=0.2, residual={"embedding_dropout": 0.4}).named_modules()
        if isinstance(module, DropoutSite)
    }
    assert sites.pop("model.embedding_dropout") == 0.4
    assert {p for name, p in sites.items() if "core_attention" not in name} == {0.2}
    assert built(hidden_dropout=0.2).model.embedding_dropout.p == 0.2, "left out, it is that of the stream"
    decoder, columns = built("gpt2", residual={"embedding_dropout": 0.4}).model, replace(key(), tokens=key().tokens.t())
    given: list[Tensor] = []
    decoder.layers.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    context = LayerContext(hidden_dropout_key=columns)
    decoder(tokens(), torch.arange(S), context, None, None)
    embedded = embedding(tokens().t(), decoder.embed_tokens.weight) + decoder.embed_positions.weight[:S].unsqueeze(1)
    want = dropout(embedded, 0.4, columns.named(name_number("model.embedding_dropout")))
    torch.testing.assert_close(given[0], want, rtol=EXACT, atol=EXACT)


def test_the_factor_of_the_embedding_leaves_positions_as_they_are():
    decoder = built("gpt2", multipliers={"embedding": 3.0}).model
    given: list[Tensor] = []
    decoder.layers.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    decoder(tokens(), torch.arange(S), LayerContext(), None, None)
    want = 3.0 * embedding(tokens().t(), decoder.embed_tokens.weight) + decoder.embed_positions.weight[:S].unsqueeze(1)
    torch.testing.assert_close(given[0], want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("fused", [False, True], ids=["loss of logits", "fused linear loss"])
def test_logits_have_their_factor_and_then_their_bound_wherever_they_are_made(fused):
    multipliers = {"logits": 2.0, "logit_softcap": 1.5}
    plain = built()
    model = GPTModel(config(multipliers=multipliers), options(fused_linear_cross_entropy=fused), seed=1)
    model.load_state_dict(plain.state_dict())
    want = 1.5 * torch.tanh(2.0 * plain(tokens()) / 1.5)
    assert (want.abs() > 1.4).any(), "the bound shows"
    torch.testing.assert_close(model(tokens()), want, rtol=EXACT, atol=EXACT)
    losses = cross_entropy(want.flatten(0, 1), tokens(2).flatten(), reduction="none").view(B, S)
    got = model(tokens(), labels=tokens(2))
    torch.testing.assert_close(got, losses, rtol=EXACT, atol=EXACT)
    caches = model.new_caches(S)
    after = torch.cat([model(piece, caches=caches) for piece in tokens().split([5, 1, 2], dim=1)], dim=1)
    torch.testing.assert_close(after, want, rtol=EXACT, atol=EXACT)
    got.sum().backward()
    losses.sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_a_residual_stream_in_float32_loses_less_in_many_layers(placement):
    shape = {"num_layers": 24, "init_method_std": 0.1}  # wider weights would magnify any difference
    exact = built(**shape, residual={"norm_placement": placement})
    exact.load_state_dict({name: weight.bfloat16() for name, weight in exact.state_dict().items()})
    errors = []
    for fp32 in (False, True):
        residual = {"norm_placement": placement, "fp32": fp32}
        model = GPTModel(config(**shape, residual=residual), options(dtype=torch.bfloat16), seed=1)
        model.load_state_dict(exact.state_dict())
        given: list[Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda module, inputs, given=given: given.append(inputs[0]))
        logits = model(tokens())
        assert (given[0].dtype, logits.dtype) == (torch.float32 if fp32 else torch.bfloat16, torch.bfloat16)
        errors.append((logits.double() - exact(tokens())).norm().item())
    assert errors[1] < 0.9 * errors[0]
