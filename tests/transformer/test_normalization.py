"""normalization: against torch's RMSNorm and LayerNorm, and formulas, with full parameters on every rank."""

import pytest
import torch
from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.parameters import declared_parameters, initialize_parameters_
from megalith.transformer.normalization import Normalization
from tests.parallel.groups import collection, load_, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

H = 16
EPS = 1e-3  # large, so that using it in the wrong place shows
EXACT = 1e-14


def of(normalization: str, **residual: object) -> TransformerConfig:
    return config(normalization=normalization, layernorm_epsilon=EPS, residual=residual)


def built(normalization: str, **changes: object) -> Normalization:
    layer = Normalization(of(normalization), options(**changes))
    initialize_parameters_(layer, seed=1)
    return layer


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


@pytest.mark.parametrize(("normalization", "module"), [("RMSNorm", nn.RMSNorm), ("LayerNorm", nn.LayerNorm)])
def test_it_is_torchs_module_forward_and_backward(normalization, module):
    ours, theirs = built(normalization), module(H, eps=EPS, dtype=torch.float64)
    weights = {name: torch.randn(H, dtype=torch.float64) for name, _ in theirs.named_parameters()}
    theirs.load_state_dict(weights)
    load_(ours, weights)
    results = []
    for layer in (ours, theirs):
        x = x_of(3, 2).requires_grad_()
        y = layer(x)
        y.backward(x_of(3, 2))
        results.append({"y": y, "dx": x.grad} | {name: p.grad for name, p in layer.named_parameters()})
    torch.testing.assert_close(results[0], results[1], rtol=EXACT, atol=EXACT)


def test_it_is_the_formula():
    x = x_of(4)
    rms = x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(built("RMSNorm")(x), rms, rtol=EXACT, atol=EXACT)
    centred = x - x.mean(dim=-1, keepdim=True)
    layer_norm = centred / (centred.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(built("LayerNorm")(x), layer_norm, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_narrow_features_stay_narrow(normalization):
    layer = built(normalization, dtype=torch.bfloat16)
    y = layer(x_of(5).bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), built(normalization)(x_of(5).bfloat16().double()), rtol=8e-3, atol=1e-2)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_zero_centred_gain_is_one_more_than_the_weight_which_begins_at_zero(normalization):
    zero_centred, plain = Normalization(of(normalization, zero_centered_norm=True), options()), built(normalization)
    initialize_parameters_(zero_centred, seed=1)
    assert not zero_centred.weight.any()
    assert torch.equal(zero_centred(x_of(3)), plain(x_of(3)))
    with torch.no_grad():
        zero_centred.weight.copy_(torch.linspace(-1.0, 1.0, H))
        plain.weight.copy_(1.0 + zero_centred.weight)
    torch.testing.assert_close(zero_centred(x_of(3)), plain(x_of(3)), rtol=EXACT, atol=EXACT)
    sums = [layer.after_residual(x_of(3), x_of(3).sin(), None) for layer in (zero_centred, plain)]
    torch.testing.assert_close(*sums, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_of_a_residual_stream_in_float32_the_output_has_the_dtype_of_the_weights(normalization):
    layer = Normalization(of(normalization, fp32=True), options(dtype=torch.bfloat16))
    initialize_parameters_(layer, seed=1)
    stream, added = x_of(5).float(), x_of(5).bfloat16()
    want = built(normalization)(stream.double())
    y = layer(stream)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)  # rounded once
    y, total = layer.after_residual(added, stream, None)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, stream + added.float())


def test_rmsnorm_has_a_weight_and_layernorm_a_bias_too():
    assert [name for name, _, _ in declared_parameters(built("RMSNorm"))] == ["weight"]
    assert [name for name, _, _ in declared_parameters(built("LayerNorm"))] == ["weight", "bias"]


def gradients_on_this_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    groups = collection(2)
    layer = built("LayerNorm", pg_collection=groups, sequence_parallel=sequence_parallel)
    x, dy = x_of(4, 3), x_of(4, 3).square()
    if sequence_parallel:
        x, dy = (each.chunk(2)[groups.rank("tp")] for each in (x, dy))
    layer(x).backward(dy)
    return {name: whole(parameter.grad) for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_under_sequence_parallelism_a_ranks_gradient_is_one_term_of_the_sum(sequence_parallel):
    layer = built("LayerNorm")
    layer(x_of(4, 3)).backward(x_of(4, 3).square())
    want = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for got in ranks(2, gradients_on_this_rank, sequence_parallel):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
