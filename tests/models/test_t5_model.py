"""models/t5_model: padding, packed rows, dropout and stages, compared with single pairs of rows and formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.models.bert_model import BertModel
from megalith.models.gpt_model import GPTModel
from megalith.models.hf.parameters import parameter_shapes
from megalith.models.t5_model import T5Model
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.encoder_output import PairedDocuments
from megalith.transformer.stage import Stage

VOCAB = 61
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "ffn_hidden_size": 40,
    "activation": "relu",
    "position_embedding_type": "relative",
    "relative_position": {"num_buckets": 8, "max_distance": 9},
    "attention": {"scale": 1.0},
    "tie_word_embeddings": True,
    "multipliers": {"logits": 32**-0.5},
    "t5": {"num_decoder_layers": 3},
    "init_method_std": 0.3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "gated, untied": {"activation": "geglu_tanh", "tie_word_embeddings": False, "multipliers": {}},
    "post, biases, softcap": {
        "residual": {"norm_placement": "post"},
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "attention": {"logit_softcap": 2.0},
    },
    "sandwich, one decoder layer": {"residual": {"norm_placement": "sandwich"}, "t5": {"num_decoder_layers": 1}},
}
# number of tokens in the encoder's and the decoder's rows
LENGTHS = [(5, 9), (9, 2), (3, 4)]


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**T5 | fields)


def built(settings: TransformerConfig, **arguments: Any) -> T5Model:
    return T5Model(settings, BuildOptions(ProcessGroupCollection.single(), torch.float64), **arguments)


def pairs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """tokens, decoder tokens and labels, [1, length] each, for LENGTHS."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, long) for lengths in LENGTHS for long in (*lengths, lengths[1])]
    drawn = [torch.randint(VOCAB, size, generator=generator) for size in sizes]
    return list(zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True))


def one_by_one(model: T5Model) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of each pair, and the gradients of the sum of all."""
    losses = [model(tokens, decoder_tokens, labels=labels)[0] for tokens, decoder_tokens, labels in pairs()]
    return losses, gradients(model, losses)


def gradients(model: T5Model, losses: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.cat(losses).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def padded(pad: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens, decoder tokens, labels, and both masks; the rows are longer than any of LENGTHS."""
    Se, Sd = (max(each) + 2 for each in zip(*LENGTHS, strict=True))
    rows = [torch.full((len(LENGTHS), S), pad) for S in (Se, Sd, Sd)]
    for index, pair in enumerate(pairs()):
        for batch, row in zip(rows, pair, strict=True):
            batch[index, : row.shape[1]] = row
    masks = (
        torch.arange(S) < torch.tensor(lengths)[:, None]
        for S, lengths in zip((Se, Sd), zip(*LENGTHS, strict=True), strict=True)
    )
    return (*rows, *masks)


def assert_close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_padded_rows_are_the_pairs_one_by_one(fields):
    model = built(config(**fields)).eval()
    losses, want = one_by_one(model)
    tokens, decoder_tokens, labels, mask, decoder_mask = padded()
    output = model(tokens, decoder_tokens, labels=labels, attention_mask=mask, decoder_attention_mask=decoder_mask)
    found = [output[row, :length] for row, (_, length) in enumerate(LENGTHS)]
    assert_close(found, losses)
    assert_close(gradients(model, found), want)


def test_padding_after_the_rows_of_the_decoder_needs_no_mask():
    model = built(config()).eval()
    tokens, decoder_tokens, labels, mask, decoder_mask = padded()
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    want = model(tokens, decoder_tokens, labels=labels, **masks)
    found = model(tokens, decoder_tokens, labels=labels, attention_mask=mask)
    assert_close(found[decoder_mask], want[decoder_mask])


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_packed_rows_are_the_pairs_one_by_one(fields):
    model = built(config(**fields)).eval()
    losses, want = one_by_one(model)
    tokens, decoder_tokens, labels = (torch.cat(rows, dim=1) for rows in zip(*pairs(), strict=True))
    packed = (PackedSeqParams.from_lengths([list(lengths)]) for lengths in zip(*LENGTHS, strict=True))
    output = model(tokens, decoder_tokens, labels=labels, documents=PairedDocuments.from_packed(*packed))
    found = list(output[0].split([length for _, length in LENGTHS]))
    assert_close(found, losses)
    assert_close(gradients(model, found), want)


def test_what_padding_holds_changes_nothing():
    model = built(config()).eval()
    found = []
    for pad in (7, 8):
        tokens, decoder_tokens, labels, mask, decoder_mask = padded(pad)
        masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
        losses = model(tokens, decoder_tokens, labels=labels, **masks)[decoder_mask]
        found.append((losses.detach(), gradients(model, [losses])))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_row_of_nothing_but_padding_gives_its_decoder_nothing():
    model = built(config()).eval()
    added = []
    model.model.decoder.layers["0"].cross_attn.register_forward_hook(lambda _, __, output: added.append(output))
    mask = torch.tensor([[True, True, False], [False, False, False]])
    model(torch.ones(2, 3).long(), torch.ones(2, 4).long(), attention_mask=mask)
    assert added[0][:, 0].all()
    assert torch.equal(added[0][:, 1], torch.zeros(4, 32, dtype=torch.float64))


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_a_row_of_nothing_but_padding_changes_nothing_in_other_rows(fields):
    model = built(config(**fields))
    tokens, decoder_tokens, labels, mask, decoder_mask = padded()
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    want = model(tokens, decoder_tokens, labels=labels, **masks)
    gradients_wanted = gradients(model, [want[decoder_mask]])
    more = [torch.cat((each, each[:1])) for each in (tokens, decoder_tokens, labels)]
    hidden = {name: torch.cat((each, torch.zeros_like(each[:1]))) for name, each in masks.items()}
    found = model(more[0], more[1], labels=more[2], **hidden)
    assert found.isfinite().all()
    assert_close(found[:-1][decoder_mask], want[decoder_mask])
    assert_close(gradients(model, [found[hidden["decoder_attention_mask"]]]), gradients_wanted)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_losses_are_those_of_the_logits(fields):
    model = built(config(**fields)).eval()
    for tokens, decoder_tokens, labels in pairs():
        logits = model(tokens, decoder_tokens)
        want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        assert_close(model(tokens, decoder_tokens, labels=labels), want)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_a_model_has_the_parameters_that_its_settings_name(fields):
    settings = config(**fields)
    found = {name: tuple(each.shape) for name, each in built(settings).named_parameters()}
    assert parameter_shapes(settings) == found


def test_the_encoder_reads_both_ways_and_the_decoder_what_came_before():
    model = built(config()).eval()
    tokens, decoder_tokens, _ = pairs()[0]

    def changed(row: Tensor) -> Tensor:
        return torch.cat((row[:, :-1], (row[:, -1:] + 1) % VOCAB), dim=1)

    states = [model(row) for row in (tokens, changed(tokens))]
    assert not (states[0] == states[1]).all(dim=-1).any()
    logits = [model(tokens, row) for row in (decoder_tokens, changed(decoder_tokens))]
    same = (logits[0] == logits[1]).all(dim=-1)[0]
    assert same[:-1].all()
    assert not same[-1]
    assert not torch.allclose(model(changed(tokens), decoder_tokens)[:, 0], logits[0][:, 0])


def test_hidden_states_are_what_the_head_reads():
    model = built(config()).eval()
    tokens, decoder_tokens, _ = pairs()[0]
    hidden = model(tokens, decoder_tokens, output="hidden")  # [B, Sd, H]
    assert_close(model(tokens, decoder_tokens), hidden * 32**-0.5 @ model.model.embed_tokens.weight.t())
    assert model(tokens).shape == (1, 5, 32)


DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def ids(rows: Tensor, decoder_rows: Tensor) -> Tensor:
    """int64 [B, Se + Sd]"""
    number = rows.shape[1] + decoder_rows.shape[1]
    return torch.arange(len(rows) * number).view(len(rows), number)


def test_masks_of_dropout_are_drawn_by_the_tokens_of_both_rows():
    model = built(config(**DROPS))
    tokens, decoder_tokens, labels, *_ = padded()
    whole = ids(tokens, decoder_tokens)
    both = model(tokens, decoder_tokens, labels=labels, dropout_key=DropoutKey(1, 2, whole))
    alone = model(tokens[:1], decoder_tokens[:1], labels=labels[:1], dropout_key=DropoutKey(1, 2, whole[:1]))
    assert_close(both[:1], alone)
    assert not torch.allclose(both, model(tokens, decoder_tokens, labels=labels))


def test_every_place_of_t5_drops_under_a_name_of_its_own():
    model = built(config(**DROPS))
    dropped: dict[str, int] = {}
    for name, site in model.named_modules():
        if isinstance(site, DropoutSite):
            dropped[name] = site.number
    in_layers = ["self_attn.core_attention.dropout", "self_attn_dropout", "mlp.inner_dropout", "mlp_dropout"]
    in_decoder = [*in_layers, "cross_attn.dropout", "cross_attn_dropout"]
    want = {f"model.{stack}.{end}_dropout" for stack in ("encoder", "decoder") for end in ("embedding", "norm")}
    want |= {f"model.encoder.layers.{layer}.{name}" for layer in range(2) for name in in_layers}
    want |= {f"model.decoder.layers.{layer}.{name}" for layer in range(3) for name in in_decoder}
    assert dropped.keys() == want
    assert len(set(dropped.values())) == len(want)


@pytest.mark.parametrize("place", ["embedding_dropout", "norm_dropout", "mlp.inner_dropout", "cross_attn.dropout"])
def test_without_one_of_these_dropouts_the_loss_is_another(place):
    model = built(config(**DROPS))
    tokens, decoder_tokens, labels, *_ = padded()
    key = DropoutKey(1, 2, ids(tokens, decoder_tokens))
    before = model(tokens, decoder_tokens, labels=labels, dropout_key=key)
    sites = [site for name, site in model.named_modules() if name.endswith(place)]
    sites[-1].p = 0.0
    assert not torch.allclose(before, model(tokens, decoder_tokens, labels=labels, dropout_key=key))


def test_inner_features_of_the_mlp_are_dropped_by_their_global_indices():
    model = built(config(**DROPS))
    mlp = model.model.encoder.layers["0"].mlp
    seen = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens, decoder_tokens, labels, *_ = padded()
    model(tokens, decoder_tokens, labels=labels, dropout_key=DropoutKey(1, 2, ids(tokens, decoder_tokens)))
    mlp.inner_dropout.p = 0.0
    model(tokens, decoder_tokens, labels=labels, dropout_key=DropoutKey(1, 2, ids(tokens, decoder_tokens)))
    kept = (seen[0] != 0) | (seen[1] == 0)
    assert_close(seen[0], torch.where(kept, seen[1] / 0.8, 0.0))
    assert 0.05 < 1 - kept[seen[1] != 0].double().mean() < 0.35


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("fields", [SHAPES["tied"], SHAPES["gated, untied"] | DROPS], ids=["tied", "with dropout"])
def test_stages_compute_what_the_whole_model_does(fields, cuts):
    settings = config(**fields)
    tokens, decoder_tokens, labels, mask, decoder_mask = padded()
    batch = {
        "labels": labels,
        "attention_mask": mask,
        "decoder_attention_mask": decoder_mask,
        "dropout_key": DropoutKey(1, 2, ids(tokens, decoder_tokens)),
    }
    want = built(settings)(tokens, decoder_tokens, **batch)
    hidden = None
    for first, last in zip((0, *cuts), (*cuts, 5), strict=True):
        stage = built(settings, stage=Stage(first, last, has_embedding=first == 0, has_head=last == 5))
        assert sorted(stage.layers(), key=id) == sorted(stage.model.all_layers(), key=id)
        hidden = stage(tokens, decoder_tokens, hidden=hidden, **batch)
        assert last == 5 or hidden.shape == (tokens.shape[1] + decoder_tokens.shape[1], len(LENGTHS), 32)
    assert torch.equal(hidden, want)


def test_a_residual_stream_in_float32_between_stages_changes_nothing():
    settings = config(residual={"fp32": True})
    in_bfloat16 = BuildOptions(ProcessGroupCollection.single(), torch.bfloat16)
    tokens, decoder_tokens, labels, mask, _ = padded()
    batch = {"labels": labels, "attention_mask": mask}
    want = T5Model(settings, in_bfloat16).eval()(tokens, decoder_tokens, **batch)
    for cut in (1, 2, 4):
        first = T5Model(settings, in_bfloat16, stage=Stage(0, cut, has_embedding=True, has_head=False)).eval()
        last = T5Model(settings, in_bfloat16, stage=Stage(cut, 5, has_embedding=False, has_head=True)).eval()
        hidden = first(tokens, decoder_tokens, **batch)
        assert hidden.dtype == torch.float32
        assert torch.equal(last(tokens, decoder_tokens, hidden=hidden, **batch), want)


def test_the_output_of_the_encoder_is_not_asked_of_a_stage():
    stage = built(config(), stage=Stage(0, 3, has_embedding=True, has_head=False))
    with pytest.raises(ShapeError, match="this is a stage; pass decoder_tokens"):
        stage(torch.zeros(1, 4).long())


MASK = torch.ones(1, 4).bool()
PACKED = PairedDocuments.from_packed(*(PackedSeqParams.from_lengths([[size]]) for size in (4, 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[True, False, True, True]])}, "padding between"),
        ({"attention_mask": MASK, "documents": PACKED}, "pass only documents, which PairedDocuments.from_padding"),
        (
            {"tokens": torch.zeros(1, 5).long(), "documents": PACKED},
            r"must have the tokens' batch size and row length, \[1, 5\]",
        ),
        (
            {"decoder_tokens": torch.zeros(1, 4).long(), "documents": PACKED},
            r"must have the tokens' batch size and row length, \[1, 4\]",
        ),
        ({"hidden": torch.zeros(4, 1, 32)}, "takes no hidden states"),
        ({"labels": torch.zeros(1, 4).long()}, r"labels must have the shape of the tokens, \[1, 3\]; got \[1, 4\]"),
        ({"decoder_tokens": torch.zeros(2, 3).long()}, r"must have as many rows as tokens \(1\); got 2"),
        (
            {"attention_mask": torch.ones(1, 5).bool()},
            r"^attention_mask must be bool with the shape of the tokens, \[1, 4\].*got .* \[1, 5\]",
        ),
        (
            {"decoder_attention_mask": torch.ones(2, 3).bool()},
            r"^decoder_attention_mask must be .*, \[1, 3\].*\[2, 3\]",
        ),
        ({"decoder_tokens": torch.zeros(1, 0).long()}, "must have at least one token"),
        ({"decoder_tokens": None, "labels": torch.zeros(1, 4).long()}, "need decoder_tokens; pass it"),
        (
            {"dropout_key": DropoutKey(1, 2, torch.arange(4).view(1, 4))},
            r"token ids of shape \[1, 7\], the encoder's .*; got \[1, 4\]",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    rows = {"tokens": torch.zeros(1, 4).long(), "decoder_tokens": torch.zeros(1, 3).long()}
    with pytest.raises(ShapeError, match=message):
        built(config(**DROPS))(**rows | arguments)


def test_a_model_is_not_built_from_the_settings_of_another_kind():
    with pytest.raises(ConfigError, match="GPTModel needs settings of a gpt model; got settings of a t5 model"):
        GPTModel(config())
    with pytest.raises(ConfigError, match="BertModel needs settings of a bert model; got settings of a t5 model"):
        BertModel(config())
    with pytest.raises(ConfigError, match="T5Model needs settings of a t5 model; got settings of a gpt model"):
        T5Model(TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2))


@pytest.mark.parametrize(
    ("cuts", "shared", "copied"),
    [
        # by stage: E for the embedding, e and d for the bias tables of the encoder and the decoder
        ((2,), ["E", "E"], ["", "E"]),
        ((1,), ["Ee", "Ee"], ["", "Ee"]),
        ((3,), ["Ed", "Ed"], ["", "Ed"]),
        ((1, 4), ["Ee", "ed", "Ed"], ["", "e", "Ed"]),
        ((1, 2, 3, 4), ["Ee", "e", "d", "d", "Ed"], ["", "e", "", "d", "Ed"]),
    ],
    ids=str,
)
def test_stages_share_the_embedding_and_the_tables_of_stacks_that_are_cut(cuts, shared, copied):
    letters = {
        "model.embed_tokens.weight": "E",
        "model.encoder.position_bias.weight": "e",
        "model.decoder.position_bias.weight": "d",
    }
    ends = list(zip((0, *cuts), (*cuts, 5), strict=True))
    stages = [built(config(), stage=Stage(*each, has_embedding=each[0] == 0, has_head=each[1] == 5)) for each in ends]
    for stage, in_both, in_copies in zip(stages, shared, copied, strict=True):
        letter_of = {id(weight): letters.get(name) for name, weight in stage.named_parameters()}
        assert "".join(letter_of[id(weight)] for weight in stage.shared_weights()) == in_both
        assert "".join(letter_of[id(weight)] for weight in stage.copied_weights()) == in_copies
    assert built(config()).shared_weights() == built(config()).copied_weights() == []
