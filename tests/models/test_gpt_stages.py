"""gpt_model in stages: in sequence they equal the whole model, bit for bit; inputs of a stage, and refusals."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.stage import Stage
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

B, S, V = 2, 8, 31
EXACT = 1e-11
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
ONE_PROCESS = options()


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(seed))


def stages(
    cuts: list[int], shape: str = "llama", options: BuildOptions = ONE_PROCESS, **changes: Any
) -> list[GPTModel]:
    """A model of four layers, split before each layer in ``cuts``."""
    borders = [0, *cuts, 4]
    parts = [
        Stage(first, last, has_embedding=first == 0, has_head=last == 4) for first, last in itertools.pairwise(borders)
    ]
    shapes = config(shape, num_layers=4, tie_word_embeddings=False, **changes)
    return [GPTModel(shapes, options, stage=part, seed=1) for part in parts]


def through(models: list[GPTModel], **inputs: Any) -> dict[str, Tensor]:
    """The last stage's output, and every gradient by name; stages exchange values only, as ranks would."""
    given: list[Tensor | None] = [None]
    made: list[Tensor] = []
    for model in models:
        made.append(model(tokens(), hidden=given[-1], **inputs))
        given.append(made[-1].detach().requires_grad_())
    y = made[-1]
    dy = torch.cos(torch.arange(y.numel()).double()).view(y.shape)
    for out, into in zip(reversed(made), reversed(given[:-1]), strict=True):
        out.backward(dy)
        dy = None if into is None else into.grad
    gradients = [(name, parameter.grad) for model in models for name, parameter in model.named_parameters()]
    assert len(dict(gradients)) == len(gradients), "no stage has what another has"
    return {"y": y.detach()} | dict(gradients)


@pytest.mark.parametrize("labelled", [False, True], ids=["logits", "losses"])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("cuts", [[2], [1, 3]], ids=str)
def test_stages_after_each_other_are_the_model(cuts, shape, labelled):
    packed = PackedSeqParams.from_lengths([[3, 5], [8]])
    key = DropoutKey(3, 0, torch.arange(B * S).view(B, S))
    inputs = {"labels": tokens(2) if labelled else None, "dropout_key": key, "packed_seq_params": packed}
    want, got = (through(stages(each, shape, **DROPS), **inputs) for each in ([], cuts))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


ENDS = {
    "activation": "geglu_tanh",
    "multipliers": {"embedding": 3.0, "residual": 0.5, "logits": 2.0, "logit_softcap": 1.5},
}


@pytest.mark.parametrize("labelled", [False, True], ids=["logits", "losses"])
@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_factors_and_norms_belong_to_the_stage_that_has_their_part(placement, labelled):
    inputs = {"labels": tokens(2) if labelled else None}
    shape = {**ENDS, "residual": {"norm_placement": placement, "zero_centered_norm": True}}
    want, got = (through(stages(each, **shape), **inputs) for each in ([], [1, 3]))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_stages_hand_each_other_a_residual_stream_in_float32(placement):
    narrow, residual = options(dtype=torch.bfloat16), {"norm_placement": placement, "fp32": True}
    models = stages([2], options=narrow, residual=residual)
    assert models[0](tokens()).dtype == torch.float32
    want, got = (through(stages(each, options=narrow, residual=residual), labels=tokens(2)) for each in ([], [2]))
    assert want["model.embed_tokens.weight"].dtype == torch.bfloat16
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def on_this_rank() -> dict[str, Tensor]:
    """Two stages, each split over tp, with hidden states [S/tp, B, H] in between."""
    key = DropoutKey(3, 0, torch.arange(B * S).view(B, S))
    build = options(pg_collection=collection(2), sequence_parallel=True)
    found = through(stages([2], options=build, **DROPS), dropout_key=key)
    return {name: whole(value) for name, value in found.items()}


def test_split_over_tp_too_they_are_the_model():
    key = DropoutKey(3, 0, torch.arange(B * S).view(B, S))
    want = through(stages([], **DROPS), dropout_key=key)
    for got in ranks(2, on_this_rank):
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_stages_follow_the_caches_of_their_own_layers():
    (whole,), (first, second) = stages([]), stages([2])
    caches, others = first.new_caches(S), second.new_caches(S)
    assert (caches.keys(), others.keys()) == ({0, 1}, {2, 3})
    for piece, want in zip(tokens().split([5, 3], dim=1), whole(tokens()).split([5, 3], dim=1), strict=True):
        got = second(piece, caches=others, hidden=first(piece, caches=caches))
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_a_stage_asks_for_its_layers_by_their_indices_in_the_whole():
    asked: list[int] = []

    def spec_of(index: int) -> LayerSpec:
        asked.append(index)
        return LayerSpec()

    part = Stage(1, 3, has_embedding=False, has_head=False)
    model = GPTModel(config(num_layers=4), options(), stage=part, spec_of=spec_of)
    assert asked == [1, 2]
    assert model.layers() == [model.get_submodule(f"model.layers.{index}") for index in (1, 2)]
    assert {name.split(".")[1] for name, _ in model.named_parameters()} == {"layers"}


def test_tied_embeddings_are_one_weight_in_two_stages_which_counts_in_the_first():
    first, middle, last = (
        GPTModel(config("gpt2", num_layers=3), options(), stage=Stage(i, i + 1, i == 0, i == 2), seed=1)
        for i in range(3)
    )
    [embedding], [copy] = first.shared_weights(), last.shared_weights()
    assert torch.equal(embedding, copy)
    assert [name for name, weight in last.named_parameters() if weight is copy] == ["model.embed_tokens.weight"]
    assert (first.copied_weights(), [each is copy for each in last.copied_weights()]) == ([], [True])
    assert middle.shared_weights() == middle.copied_weights() == []
    whole = GPTModel(config("gpt2", num_layers=3), options(), seed=1)
    assert whole.shared_weights() == whole.copied_weights() == []


def test_hidden_states_are_taken_by_a_stage_without_the_embedding_and_by_no_other():
    first, second = stages([2])
    with pytest.raises(ShapeError, match="needs those of the previous stage; this stage has no embedding"):
        second(tokens())
    with pytest.raises(ShapeError, match=r"takes no hidden states.*this stage has the embedding"):
        first(tokens(), hidden=first(tokens()))
