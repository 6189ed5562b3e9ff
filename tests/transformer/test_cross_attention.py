"""cross_attention and encoder_output: the formula, what each decoder token sees, and gradients of both inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.cross_attention import CrossAttention
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.encoder_output import EncoderOutput, PairedDocuments
from megalith.transformer.layer_context import LayerContext
from tests.transformer.shapes import options

B, A, D, H = 2, 4, 6, 16
EXACT = 1e-12


def built(**changes: Any) -> CrossAttention:
    settings: dict[str, Any] = {
        "vocab_size": 31,
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": A,
        "kv_channels": D,
        "position_embedding_type": "relative",
        "t5": {"num_decoder_layers": 1},
        "init_method_std": 0.5,
    }
    layer = CrossAttention(TransformerConfig(**settings | changes), options())
    torch.manual_seed(3)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    name_dropout_sites_(layer)
    return layer


def states(Sd: int, Se: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, e = (torch.randn(S, B, H, generator=generator, dtype=torch.float64) for S in (Sd, Se))
    return x.requires_grad_(), e.requires_grad_()


def by_formula(layer: CrossAttention, x: Tensor, e: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """One query of one head at a time; ``seen`` bool [B, Sd, Se]."""
    q, k, v = (p(y).view(len(y), B, A, D) for p, y in ((layer.q_proj, x), (layer.k_proj, e), (layer.v_proj, e)))
    out = torch.zeros_like(q)
    for b in range(B):
        for i in range(len(x)):
            keys = torch.arange(len(e)) if seen is None else seen[b, i].nonzero().flatten()
            for a in range(A):
                if len(keys):
                    scores = scale * k[keys, b, a] @ q[i, b, a]
                    out[i, b, a] = scores.softmax(0) @ v[keys, b, a]
    return layer.o_proj(out.flatten(2))


def padded(Sd: int, Se: int) -> PairedDocuments:
    """Rows with padding before and after, and a decoder row whose encoder row has no tokens."""
    is_token = torch.zeros(B, Se, dtype=torch.bool)
    is_token[0, 1 : Se - 1] = True
    return PairedDocuments.from_padding(is_token, torch.arange(Sd) < torch.tensor([[Sd - 1], [Sd]]))


@pytest.mark.parametrize("is_padded", [False, True], ids=["all tokens", "padded"])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize(("Sd", "Se"), [(3, 7), (7, 3), (5, 5), (1, 4)])
def test_it_is_its_formula_forward_and_backward(Sd, Se, scale, is_padded):
    layer = built(attention={"scale": scale})
    x, e = states(Sd, Se)
    seen = padded(Sd, Se).seen(torch.arange(Sd)) if is_padded else None
    got = layer(x, LayerContext(encoder=EncoderOutput(e, seen)))
    want = by_formula(layer, x, e, D**-0.5 if scale is None else scale, None if seen is None else seen[:, 0])
    torch.testing.assert_close(got, want, rtol=0, atol=EXACT)
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = (x, e, *layer.parameters())
    both = (torch.autograd.grad(y, leaves, dy, materialize_grads=True) for y in (got, want))
    torch.testing.assert_close(*both, rtol=0, atol=1e-11)  # sums of up to 14 terms


def test_dropout_without_padding_drops_shares_of_what_is_seen():
    layer = built(attention_dropout=0.4)
    x, e = states(4, 6)
    ids = torch.arange(B * 4).view(B, 4)
    context = LayerContext(encoder=EncoderOutput(e), token_dropout_key=DropoutKey(1, 2, ids))
    dropped, again = (layer(x, context) for _ in range(2))
    assert torch.equal(dropped, again)
    assert not torch.allclose(dropped, layer.eval()(x, context))


def test_without_an_encoder_it_is_an_error():
    with pytest.raises(ConfigError, match="needs the encoder's output; set encoder"):
        built()(states(2, 2)[0], LayerContext())


def test_documents_of_packed_rows_belong_together_by_their_ordinals():
    encoder, decoder = (PackedSeqParams.from_lengths(rows) for rows in ([[2, 3], [4, 1]], [[1, 1, 2], [2, 1, 1]]))
    seen = PairedDocuments.from_packed(encoder, decoder).seen(torch.arange(4))
    want = [
        ["11...", "..111", ".....", "....."],  # the decoder's third document has no counterpart
        ["1111.", "1111.", "....1", "....."],
    ]
    assert [["".join(".1"[key] for key in query) for query in row] for row in seen[:, 0].int().tolist()] == want


def test_tokens_of_padded_rows_see_the_tokens_of_the_other_row():
    seen = padded(3, 4).seen(torch.tensor([2, 0]))
    assert seen[:, 0].int().tolist() == [[[0, 0, 0, 0], [0, 1, 1, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]]


def test_other_numbers_of_rows_are_refused():
    with pytest.raises(ShapeError, match="the same number of rows; got 1 and 2"):
        PairedDocuments.from_packed(*(PackedSeqParams.from_lengths([[3]] * rows) for rows in (1, 2)))
