"""layer: its two halves by formula, with any parts; what recomputation saves; the same numbers over tp and FSDP2."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.acceleration.recompute import recompute_modules_
from megalith.config import RopeConfig, TransformerConfig
from megalith.numerics.dropout import DropoutKey, dropout, name_number
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, initialize_parameters_
from megalith.parallel.sharding.fsdp import shard_model
from megalith.transformer.attention import SelfAttention
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.dropout import name_dropout_sites_, sequence_parallel_key
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.rotary import rotary_tables
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B, H, D = 8, 4, 16, 4
EXACT = 1e-12
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
LENGTHS = [[5, 3], [8], [1, 7], [2, 2, 4]]


class Model(DeclaringModule):
    """Two layers, without embeddings."""

    def __init__(self, shape: str, *, recompute: str = "none", **changes: object) -> None:
        super().__init__()
        of_build = {name: changes.pop(name) for name in ("pg_collection", "sequence_parallel") if name in changes}
        settings, build = config(shape, **{**DROPS, **changes}), options(**of_build)
        self.sequence_group = build.pg_collection.tp if build.sequence_parallel else None
        self.layers = nn.ModuleList(TransformerLayer(settings, build, LayerSpec()) for _ in range(2))
        name_dropout_sites_(self)
        if recompute == "full":
            recompute_modules_(self.layers)
        if recompute == "selective":
            recompute_modules_(module for module in self.modules() if isinstance(module, DotProductAttention))

    def forward(self, x: Tensor, key: DropoutKey | None, lengths: list[list[int]] | None) -> Tensor:
        context = context_of(key, lengths, self.sequence_group)
        for layer in self.layers:
            x = layer(x, context)
        return x


def context_of(
    key: DropoutKey | None, lengths: list[list[int]] | None = None, sequence_group: dist.ProcessGroup | None = None
) -> LayerContext:
    return LayerContext(
        documents=None if lengths is None else PackedSeqParams.from_lengths(lengths),
        rotary=rotary_tables(torch.arange(S), D, RopeConfig(), torch.float64),
        token_dropout_key=key,
        hidden_dropout_key=None if key is None else sequence_parallel_key(key, sequence_group),
    )


def built(shape: str = "llama", **changes: object) -> Model:
    model = Model(shape, **changes)
    initialize_parameters_(model, seed=1)
    return model


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S))


def test_it_adds_attention_and_then_the_feed_forward_each_after_a_norm_and_dropout():
    layer, context = built().layers[1], context_of(key())
    tokens = replace(key(), tokens=key().tokens.t())  # [S, B]
    attention, feed_forward = (
        tokens.named(name_number(f"layers.1.{name}")) for name in ("self_attn_dropout", "mlp_dropout")
    )
    attended = layer.self_attn(layer.input_layernorm(x_of()), context)
    h = x_of() + dropout(attended, 0.2, attention)
    want = h + dropout(layer.mlp(layer.post_attention_layernorm(h), context), 0.2, feed_forward)
    assert torch.equal(layer(x_of(), context), want)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_norms_are_where_their_placement_says_and_what_is_added_has_its_factor(placement):
    settings = {"residual": {"norm_placement": placement}, "multipliers": {"residual": 0.3}}
    layer, context = built(**settings).layers[1], context_of(key())
    with torch.no_grad():
        for number, (name, parameter) in enumerate(layer.named_parameters()):
            if name.endswith("layernorm.weight"):
                parameter.add_(0.1 * number)  # makes the norms distinguishable
    tokens = replace(key(), tokens=key().tokens.t())  # [S, B]

    def dropped(y: Tensor, name: str) -> Tensor:
        return dropout(0.3 * y, 0.2, tokens.named(name_number(f"layers.1.{name}")))

    x = x_of()
    if placement == "pre":
        h = x + dropped(layer.self_attn(layer.input_layernorm(x), context), "self_attn_dropout")
        want = h + dropped(layer.mlp(layer.post_attention_layernorm(h), context), "mlp_dropout")
    elif placement == "post":
        h = layer.post_attention_layernorm(x + dropped(layer.self_attn(x, context), "self_attn_dropout"))
        want = layer.post_mlp_layernorm(h + dropped(layer.mlp(h, context), "mlp_dropout"))
    else:
        attended = layer.self_attn_output_layernorm(layer.self_attn(layer.input_layernorm(x), context))
        h = x + dropped(attended, "self_attn_dropout")
        fed = layer.mlp_output_layernorm(layer.mlp(layer.post_attention_layernorm(h), context))
        want = h + dropped(fed, "mlp_dropout")
    norms = [name for name, _ in layer.named_children() if name.endswith("norm")]
    assert len(norms) == {"pre": 2, "post": 2, "sandwich": 4}[placement]
    torch.testing.assert_close(layer(x, context), want, rtol=EXACT, atol=EXACT)


class Halved(nn.Module):
    """Another kind of feed-forward, which reads the context."""

    def __init__(self, settings: TransformerConfig, build: BuildOptions) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        return x / 2.0 if context.documents is None else torch.zeros_like(x)


def test_its_parts_are_those_of_the_spec_and_each_is_given_the_context():
    narrow = LayerSpec(attention=partial(SelfAttention, window=1), feed_forward=Halved)
    layer = TransformerLayer(config(), options(), narrow)
    initialize_parameters_(layer, seed=1)
    assert [name for name, _ in layer.named_parameters() if name.startswith("mlp")] == []
    x = x_of()
    # the attention of a single token is its own value
    value = layer.self_attn.v_proj(layer.input_layernorm(x)).view(S, B, 2, D).repeat_interleave(2, dim=2).flatten(2)
    h = x + layer.self_attn.o_proj(value)
    want = h + layer.post_attention_layernorm(h) / 2.0
    torch.testing.assert_close(layer(x, context_of(None)), want, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(layer(x, context_of(None, LENGTHS)), h, rtol=EXACT, atol=EXACT)


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
    alive: list[Tensor] = []  # a freed storage's address may be reused

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
    """Loss and unsharded gradients of all samples, on this rank of a tp x FSDP2 layout."""
    groups = collection(tensor)
    with torch.device("meta"):
        model = Model("llama", pg_collection=groups, sequence_parallel=sequence_parallel, recompute=recompute)
    dtypes = {"compute_dtype": torch.float64, "param_dtype": torch.float64}
    shard_model(model, model.layers, groups, reshard_after_forward=True, **dtypes)
    model.to_empty(device="cpu")
    initialize_parameters_(model, seed=1)
    rows = torch.arange(B).chunk(groups.size("dp"))[groups.rank("dp")]
    x = x_of()[:, rows]
    if sequence_parallel:
        x = x.chunk(groups.size("tp"))[groups.rank("tp")]
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
