"""gpt_model: every shape against its formula in plain torch, forward and backward; known sizes; refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.parameters import declared_parameters
from megalith.transformer.dropout import DropoutSite
from tests.models.formula import by_formula
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import SHAPES, config, options

B, S, V = 2, 8, 31
EXACT = 1e-11
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def built(shape: str = "llama", *, training: bool = True, **changes: Any) -> GPTModel:
    model = GPTModel(config(shape, **changes), options(), seed=1)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(model):
            if len(spec.shape) == 1:  # weights start at one and biases at zero, which would hide mistakes
                parameter.add_(torch.linspace(-0.2, 0.3, parameter.numel()) * len(name) / 20.0)
    return model.train(training)


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_losses_and_every_gradient_are_those_of_the_formula(shape):
    model = built(shape)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    logits = torch.stack([by_formula(model.config, weights, row) for row in tokens()])
    torch.testing.assert_close(model(tokens()), logits, rtol=EXACT, atol=EXACT)
    want = cross_entropy(logits.flatten(0, 1), tokens(2).flatten(), reduction="none").view(B, S)
    losses = model(tokens(), labels=tokens(2))
    torch.testing.assert_close(losses, want, rtol=EXACT, atol=EXACT)
    losses.sum().backward()
    want.sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, rtol=EXACT, atol=EXACT)


def test_nothing_of_this_needed_torch_distributed():
    assert not dist.is_initialized()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_float32_at_least(dtype):
    model = GPTModel(config(), options(dtype=dtype), seed=1)
    logits, losses = model(tokens()), model(tokens(), labels=tokens(2))
    assert (logits.dtype, losses.dtype) == (dtype, torch.float32)
    want = cross_entropy(logits.flatten(0, 1).float(), tokens(2).flatten(), reduction="none").view(B, S)
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        # openai-community/gpt2, meta-llama/Llama-2-7b-hf, meta-llama/Meta-Llama-3-8B: published values
        (
            SHAPES["gpt2"]
            | {"vocab_size": 50257, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
            | {"max_position_embeddings": 1024},
            124_439_808,
        ),
        (
            {"vocab_size": 32000, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
            | {"ffn_hidden_size": 11008},
            6_738_415_616,
        ),
        (
            {"vocab_size": 128256, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
            | {"num_query_groups": 8, "ffn_hidden_size": 14336},
            8_030_261_248,
        ),
    ],
    ids=["gpt2", "llama 2 7b", "llama 3 8b"],
)
def test_models_of_the_field_have_their_published_number_of_parameters(settings, count):
    with torch.device("meta"):
        model = GPTModel(TransformerConfig(**settings))
    assert model.num_parameters() == count
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_built_on_meta_and_materialized_has_the_bits_of_one_built_at_once(shape):
    with torch.device("meta"):
        model = GPTModel(config(shape))
    model.materialize("cpu", seed=5)
    want = GPTModel(config(shape), seed=5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in want.named_parameters()]
    for name, parameter in want.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert not torch.equal(GPTModel(config(shape), seed=6).model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_names_are_those_of_llama():
    names = {name for name, _ in GPTModel(config(num_layers=1)).named_parameters()}
    layer = {f"self_attn.{n}_proj.weight" for n in "qkvo"} | {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} | {
        f"model.layers.0.{name}" for name in layer
    }
    assert "lm_head.weight" not in dict(GPTModel(config("gpt2")).named_parameters())


def test_no_token_sees_a_later_one():
    model = built()
    changed = tokens()
    changed[0, 5] = (changed[0, 5] + 1) % V
    before, after = model(tokens()), model(changed)
    assert torch.equal(after[0, :5], before[0, :5])
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0, 5:], before[0, 5:])


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_packed_documents_with_positions_of_their_own_are_separate_sequences(shape):
    model = built(shape)
    packed = PackedSeqParams.from_lengths([[3, 5], [8]])
    got = model(tokens(), position_ids=packed.position_ids(), packed_seq_params=packed)
    for row, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 8)):
        want = model(tokens()[row : row + 1, start:end])[0]
        torch.testing.assert_close(got[row, start:end], want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("pieces", [[5, 1, 1, 1], [2, 3, 3]])
def test_tokens_that_follow_caches_give_what_all_at_once_do(pieces, shape):
    model = built(shape, training=False)
    caches = model.new_caches(8)
    got = torch.cat([model(piece, caches=caches) for piece in tokens().split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(got, model(tokens()), rtol=EXACT, atol=EXACT)


def test_in_training_dropout_without_a_key_follows_torchs_seed():
    model = built("gpt2", **DROPS)
    torch.manual_seed(1)
    first, second = model(tokens()), model(tokens())
    torch.manual_seed(1)
    again = model(tokens())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_in_evaluation_there_is_no_dropout():
    model, plain = built("gpt2", training=False, **DROPS), built("gpt2", hidden_dropout=0.0, attention_dropout=0.0)
    assert torch.equal(model(tokens(), dropout_key=key()), plain(tokens()))
    state = torch.get_rng_state()
    plain(tokens())
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"


@pytest.mark.parametrize("drops", [{"hidden_dropout": 0.3}, {"attention_dropout": 0.3}, DROPS])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_with_a_key_rows_drop_the_same_however_the_batch_is_cut(shape, drops):
    model = built(shape, **drops)
    together = model(tokens(), dropout_key=key())
    assert not torch.allclose(together, model.eval()(tokens()))
    model.train()
    for row in range(B):
        alone = DropoutKey(3, 0, key().tokens[row : row + 1])
        got = model(tokens()[row : row + 1], dropout_key=alone)[0]
        torch.testing.assert_close(got, together[row], rtol=EXACT, atol=EXACT)


def test_every_dropout_of_a_model_draws_masks_of_its_own():
    sites = {name: module.number for name, module in built().named_modules() if isinstance(module, DropoutSite)}
    layer = {"self_attn.core_attention.dropout", "self_attn_dropout", "mlp_dropout"}
    names = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
    assert sites.keys() == names | {"model.embedding_dropout"}
    assert len(set(sites.values())) == len(sites)


@pytest.mark.parametrize(("shape", "of_a_layer"), [("llama", 7), ("gpt2", 6)])
def test_every_matrix_product_is_the_one_of_the_options(shape, of_a_layer):
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return linear(x, weight, bias)

    model = GPTModel(config(shape), options(matrix_product=noted), seed=1)
    model(tokens(), labels=tokens(2))
    assert len(shapes) == 2 * of_a_layer + 1
    assert shapes[-1] == (V, 16), "the output projection too, of tied embeddings as well"


ENDS = {"multipliers": {"embedding": 3.0, "logits": 2.0, "logit_softcap": 1.5}, "residual": {"norm_placement": "post"}}


def on_this_rank(shape: str, sequence_parallel: bool, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Logits, losses, and the unsharded gradients of both."""
    groups = collection(dist.get_world_size())
    build = options(pg_collection=groups, sequence_parallel=sequence_parallel)
    model = GPTModel(config(shape, num_query_groups=4, **DROPS, **changes), build, seed=1)
    return results(model)


def results(model: GPTModel) -> dict[str, Tensor]:
    found = {}
    for what, labels in (("logits", None), ("losses", tokens(2))):
        model.zero_grad()
        y = model(tokens(), labels=labels, dropout_key=key())
        y.backward(torch.cos(torch.arange(y.numel()).double()).view(y.shape))
        gradients = {f"{what}: {name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
        found |= {what: y.detach(), **gradients}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "shape", "sequence_parallel", "changes"),
    [(2, "llama", True, {}), (2, "llama", True, ENDS), (4, "llama", False, {}), (4, "gpt2", True, {})],
)
def test_split_over_tp_logits_are_whole_on_every_rank_and_all_gradients_the_same(
    num_ranks, shape, sequence_parallel, changes
):
    want = results(GPTModel(config(shape, num_query_groups=4, **DROPS, **changes), options(), seed=1))
    assert want["logits"].shape == (B, S, V)
    for got in ranks(num_ranks, on_this_rank, shape, sequence_parallel, changes):
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_a_vocabulary_that_nobody_gave_is_refused():
    with pytest.raises(ConfigError, match=r"model.vocab_size is not set; set it, or set data.tokenizer"):
        GPTModel(config(vocab_size=None))


def test_more_tokens_than_learned_positions_are_refused():
    model = built("gpt2", max_position_embeddings=7)
    with pytest.raises(ShapeError, match=r"8 positions exceed max_position_embeddings \(7\)"):
        model(tokens())
    caches = model.new_caches(8)
    model(tokens()[:, :6], caches=caches)
    with pytest.raises(ShapeError, match=r"8 positions exceed"):
        model(tokens()[:, 6:], caches=caches)
    built("llama")(tokens().repeat(1, 10))  # rotary positions have no limit


@pytest.mark.parametrize("lengths", [[[3, 5]], [[3, 4], [7]], [[8]] * 3])
def test_documents_of_other_rows_are_refused(lengths):
    with pytest.raises(
        ShapeError, match=r"packed_seq_params must have the tokens' batch size and row length, \[2, 8\]; got"
    ):
        built()(tokens(), packed_seq_params=PackedSeqParams.from_lengths(lengths))


def refuse_on_tp() -> None:
    groups = collection(2)
    model = GPTModel(config(**DROPS), options(pg_collection=groups, sequence_parallel=True))
    with pytest.raises(
        ShapeError, match=r"S \(7\) must be divisible by tp \(2\) with sequence parallelism; use a multiple of 2"
    ):
        model(tokens()[:, :7])
    with pytest.raises(ConfigError, match=r"must drop the same elements; pass dropout_key="):
        model(tokens())


def refuse_on_cp() -> None:
    drops = GPTModel(config(**DROPS), options(pg_collection=collection(context=2)))
    positions = torch.arange(4)
    whole = r"each of the 2 ranks .* chunks of every row, .*position_ids=positions, .*zigzag_positions\(S, 2, cp_rank\)"
    with pytest.raises(ShapeError, match=whole):
        drops(tokens())
    with pytest.raises(ShapeError, match=whole):
        drops(tokens()[:, :4], position_ids=positions, caches=drops.new_caches(4))
    with pytest.raises(ConfigError, match=r"must drop the same elements; pass dropout_key="):
        drops(tokens()[:, :4], position_ids=positions)
    with pytest.raises(
        ShapeError, match=r"packed_seq_params must have the tokens' batch size and row length, \[2, 8\]; got \[2, 4\]"
    ):
        drops(tokens()[:, :4], position_ids=positions, packed_seq_params=PackedSeqParams.from_lengths([[4], [1, 3]]))


def test_rows_that_nobody_has_split_over_ranks_are_refused():
    ranks(2, refuse_on_cp)


def test_an_uneven_sequence_and_dropout_that_ranks_would_draw_apart_are_refused():
    ranks(2, refuse_on_tp)
