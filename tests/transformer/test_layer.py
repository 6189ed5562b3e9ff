"""layer: its two halves by formula, what recomputation keeps, and the same numbers split over tp and FSDP2."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megalith.numerics.dropout import DropoutKey, dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.parameters import DeclaringModule, initialize_parameters_
from megalith.parallel.sharding.fsdp import shard_model
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.rotary import rotary_table
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B, H, D = 8, 4, 16, 4
EXACT = 1e-12
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
LENGTHS = [[5, 3], [8], [1, 7], [2, 2, 4]]


class Model(DeclaringModule):
    """Layers 1 and 2 of a model, without embeddings."""

    def __init__(self, shape: str, **changes: object) -> None:
        super().__init__()
        settings = config(shape, **DROPS)
        self.layers = nn.ModuleList(TransformerLayer(settings, options(**changes), index) for index in (1, 2))

    def forward(self, x: Tensor, key: DropoutKey | None, lengths: list[list[int]] | None) -> Tensor:
        rotary = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
        packed = None if lengths is None else PackedSeqParams.from_lengths(lengths)
        for layer in self.layers:
            x = layer(x, rotary, packed, key, None)
        return x


def built(shape: str = "llama", **changes: object) -> Model:
    model = Model(shape, **changes)
    initialize_parameters_(model, seed=1)
    return model


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S))


def test_it_adds_attention_and_then_the_feed_forward_each_after_a_norm_and_dropout():
    layer = built().layers[0]
    rotary = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    tokens = replace(key(), tokens=key().tokens.t())  # [S, B]
    # layer 1: its sites are 4, 5 and 6
    attended = layer.self_attn(layer.input_layernorm(x_of()), rotary, None, key().at(4), None)
    h = x_of() + dropout(attended, 0.2, tokens.at(5))
    want = h + dropout(layer.mlp(layer.post_attention_layernorm(h)), 0.2, tokens.at(6))
    assert torch.equal(layer(x_of(), rotary, None, key(), None), want)


def results(model: Model, **inputs: object) -> dict[str, Tensor]:
    x = x_of().requires_grad_()
    loss = model(x, **inputs).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_recomputation_changes_no_bit_of_loss_and_gradients(shape, recompute, lengths):
    want = results(built(shape), key=key(), lengths=lengths)
    got = results(built(shape, recompute=recompute), key=key(), lengths=lengths)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def kept_bytes(recompute: str, drops: bool) -> int:
    """Bytes of activations that a forward keeps for backward, each storage once, without weights."""
    model = built(recompute=recompute)
    storages = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    alive: list[Tensor] = []  # a freed storage's address may come again

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = model(x_of().requires_grad_(), key() if drops else None, None)
    del y
    return sum(storages.values())


@pytest.mark.parametrize("drops", [False, True])
def test_full_recomputation_keeps_less_than_selective_and_that_less_than_none(drops):
    full, selective, none = (kept_bytes(recompute, drops) for recompute in ("full", "selective", "none"))
    assert full < selective < none


def test_full_recomputation_keeps_the_inputs_of_layers_alone():
    assert kept_bytes("full", drops=True) == 2 * S * B * H * 8  # two layers, float64


def split(tensor: int, sequence_parallel: bool, recompute: str) -> dict[str, Tensor]:
    """Loss and whole gradients of all samples, on this rank of a tp x FSDP2 layout."""
    groups = collection(tensor)
    with torch.device("meta"):
        model = Model("llama", pg_collection=groups, sequence_parallel=sequence_parallel, recompute=recompute)
    dtypes = {"compute_dtype": torch.float64, "param_dtype": torch.float64}
    shard_model(model, model.layers, groups, reshard_after_forward=True, **dtypes)
    model.to_empty(device="cpu")
    initialize_parameters_(model, seed=1)
    rows = torch.arange(B).chunk(groups.dp_size)[groups.dp_rank]
    x = x_of()[:, rows]
    if sequence_parallel:
        x = x.chunk(groups.tp_size)[groups.tp_rank]
    dropout_key = replace(key(), tokens=key().tokens[rows])
    x = x.clone().requires_grad_()
    loss = model(x, dropout_key, [LENGTHS[row] for row in rows]).square().sum()
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "tensor", "sequence_parallel", "recompute"),
    [(2, 2, False, "full"), (2, 2, True, "none"), (2, 1, False, "selective"), (4, 2, True, "full")],
)
def test_split_over_tp_and_fsdp_with_dropout_and_documents_it_is_the_same(
    num_ranks, tensor, sequence_parallel, recompute
):
    want = results(built(), key=key(), lengths=LENGTHS)
    del want["dx"]
    answers = ranks(num_ranks, split, tensor, sequence_parallel, recompute)
    copies = 1 if sequence_parallel else tensor  # ranks of tp that each have the whole loss of their rows
    total = sum(answer.pop("loss") for answer in answers) / copies
    torch.testing.assert_close(total, want.pop("loss"), rtol=EXACT, atol=EXACT)
    for got in answers:
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
