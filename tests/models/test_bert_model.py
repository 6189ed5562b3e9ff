"""models/bert_model: padding, packed rows, heads and stages, compared with single sentences and formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.models.bert_model import BertModel
from megalith.models.gpt_model import GPTModel
from megalith.models.hf.parameters import parameter_shapes
from megalith.numerics.dropout import DropoutKey, dropout, name_number
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.stage import Stage
from tests.tiny_run import GPT2, VOCAB

POST: dict[str, Any] = GPT2 | {
    "max_position_embeddings": 16,
    "activation": "gelu",
    "residual": {"norm_placement": "post"},
    "bert": {"num_token_types": 2},
    "init_method_std": 0.3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "post": {},
    "pre, rope": {"residual": {}, "position_embedding_type": "rope", "max_position_embeddings": None},
    "untied, a window, no types": {
        "tie_word_embeddings": False,
        "attention": {"window": 3},
        "bert": {"num_token_types": 0},
    },
    "without a binary head": {"bert": {"num_token_types": 3, "binary_head": False, "position_offset": 2}},
}
LENGTHS = [5, 9, 3]


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**POST | fields)


def built(settings: TransformerConfig, **arguments: Any) -> BertModel:
    return BertModel(settings, BuildOptions(ProcessGroupCollection.single(), torch.float64), **arguments)


def sentences(with_types: bool = True) -> list[dict[str, Tensor]]:
    """Sentences of LENGTHS tokens: their types, and labels for every third token."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in LENGTHS:
        tokens, labels = torch.randint(VOCAB, (2, 1, length), generator=generator)
        labels = torch.where(torch.arange(length) % 3 == 1, labels, -1)
        types = {"token_types": (torch.arange(length) > 2).long()[None]} if with_types else {}
        found.append({"tokens": tokens, "labels": labels, **types})
    return found


def sentences_for(model: BertModel) -> list[dict[str, Tensor]]:
    return sentences(with_types=model.model.embed_token_types is not None)


def one_by_one(model: BertModel) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Losses and binary logits of each sentence, and the gradients of the sum of all."""
    losses, binary = [], []
    for sentence in sentences_for(model):
        output = model(sentence.pop("tokens"), **sentence)
        losses.append(output.predictions[0])
        binary.append(output.binary_logits)
    return losses, binary, gradients(model, losses, binary)


def gradients(
    model: BertModel, losses: list[Tensor], binary: list[Tensor | None], retain_graph: bool = False
) -> dict[str, Tensor]:
    model.zero_grad()
    every = [each.flatten() for each in (*losses, *binary) if each is not None]
    torch.cat(every).sum().backward(retain_graph=retain_graph)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_padded_rows_are_the_sentences_one_by_one(fields):
    model = built(config(**fields)).eval()
    losses, binary, want = one_by_one(model)
    S = max(LENGTHS) + 2
    rows = {"tokens": 7, "labels": 5, "token_types": 1}  # padding does not count, even if it has labels
    batch = {name: torch.full((len(LENGTHS), S), rows[name]) for name in sentences_for(model)[0]}
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    for row, sentence in enumerate(sentences_for(model)):
        for name, values in sentence.items():
            batch[name][row, : LENGTHS[row]] = values
    output = model(batch.pop("tokens"), attention_mask=mask, **batch)
    found = [output.predictions[row, :length] for row, length in enumerate(LENGTHS)]
    assert_close(found, losses)
    assert_close(output.binary_logits, torch.cat(binary) if binary[0] is not None else None)
    got = gradients(model, found, [output.binary_logits])
    assert_close(got, want)


def test_rows_padded_on_the_left_are_the_texts_one_by_one():
    """Their classes are read from the first real token, wherever it is."""
    model = built(config(bert={"num_token_types": 2, "head": "classification", "num_classes": 3})).eval()
    texts = [sentence["tokens"] for sentence in sentences()]
    S = max(LENGTHS) + 2
    starts = S - torch.tensor(LENGTHS)[:, None]
    tokens = torch.full((len(LENGTHS), S), 7)
    for row, text in enumerate(texts):
        tokens[row, starts[row] :] = text
    columns = torch.arange(S)
    found = model(tokens, attention_mask=columns >= starts, position_ids=(columns - starts).clamp(min=0))
    assert_close(found, torch.cat([model(text) for text in texts]))


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_packed_rows_are_the_sentences_one_by_one(fields):
    model = built(config(**fields)).eval()
    losses, binary, want = one_by_one(model)
    packed = PackedSeqParams.from_lengths([LENGTHS])
    texts = sentences_for(model)
    batch = {name: torch.cat([each[name] for each in texts], dim=1) for name in texts[0]}
    output = model(
        batch.pop("tokens"),
        packed_seq_params=packed,
        position_ids=packed.position_ids(),
        pooled_tokens=packed.cu_seqlens_q[:-1].long(),
        **batch,
    )
    found = list(output.predictions[0].split(LENGTHS))
    assert_close(found, losses)
    assert_close(output.binary_logits, torch.cat(binary) if binary[0] is not None else None)
    assert_close(gradients(model, found, [output.binary_logits]), want)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_losses_are_those_of_the_logits(fields):
    model = built(config(**fields)).eval()
    for sentence in sentences_for(model):
        labels = sentence.pop("labels")
        logits = model(**sentence).predictions
        want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1, reduction="none")
        assert_close(model(**sentence, labels=labels).predictions, want)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_hits_are_the_labels_with_the_largest_logits(fields):
    model = built(config(**fields)).eval()
    tokens = torch.randint(VOCAB, (3, 8), generator=torch.Generator().manual_seed(0))
    likeliest = model(tokens).predictions.argmax(-1)
    kind = torch.arange(24).view(3, 8) % 5  # right, wrong, and without a label
    labels = torch.where(kind < 2, likeliest, torch.where(kind < 4, (likeliest + 1) % VOCAB, -1))
    assert torch.equal(model(tokens, labels=labels).hits, kind < 2)
    assert model.train()(tokens, labels=labels).hits is None


def test_the_fused_loss_has_the_bias_of_the_vocabulary():
    want = built(config()).eval()
    options = BuildOptions(ProcessGroupCollection.single(), torch.float64, fused_linear_cross_entropy=True)
    fused = BertModel(config(), options).eval()
    with torch.no_grad():
        want.lm_head.bias.normal_(generator=torch.Generator().manual_seed(0))
    fused.load_state_dict(want.state_dict())
    for sentence in sentences():
        tokens = sentence.pop("tokens")
        assert_close(fused(tokens, **sentence).predictions, want(tokens, **sentence).predictions)


def test_a_row_without_masked_tokens_has_no_loss_and_no_gradient():
    model = built(config())
    output = model.eval()(torch.arange(8).view(1, 8), labels=torch.full((1, 8), -1))
    assert torch.equal(output.predictions, torch.zeros(1, 8, dtype=torch.float64))
    output.predictions.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("head", ["classification", "multiple_choice"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_a_model_has_the_parameters_that_its_settings_name(fields, head):
    for settings in (config(**fields), config(**fields | {"bert": classifier(head)})):
        model = built(settings)
        assert parameter_shapes(settings) == {name: tuple(each.shape) for name, each in model.named_parameters()}


def classifier(head: str, **fields: Any) -> dict[str, Any]:
    classes = {"num_classes": 5} if head == "classification" else {}
    return {"num_token_types": 2, "head": head, **classes, **fields}


def test_classes_are_scored_from_the_first_token():
    model = built(config(bert=classifier("classification"))).eval()
    tokens = torch.arange(12).view(2, 6)
    hidden = model(tokens, output="hidden")  # [B, S, H]
    pooled = torch.tanh(model.pooler.dense(hidden[:, 0]))
    assert_close(model(tokens), pooled @ model.classifier.linear.weight.t() + model.classifier.linear.bias)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("gelu", lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
        ("gelu_tanh", lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: x.clamp(min=0)),
    ],
)
def test_a_classifier_pools_by_the_activation_that_is_set(activation, formula):
    model = built(config(bert=classifier("classification", classifier_activation=activation))).eval()
    tokens = torch.arange(12).view(2, 6)
    pooled = formula(model.pooler.dense(model(tokens, output="hidden")[:, 0]))
    assert_close(model(tokens), pooled @ model.classifier.linear.weight.t() + model.classifier.linear.bias)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_choices_are_scored_one_by_one(pooling):
    model = built(config(bert=classifier("multiple_choice", classifier_pooling=pooling))).eval()
    tokens, types = torch.randint(2, (2, 3, 4, 6), generator=torch.Generator().manual_seed(0))  # [B, choices, S]
    mask = torch.arange(6).expand(3, 4, 6) < 5
    scores = model(tokens, token_types=types, attention_mask=mask)
    assert scores.shape == (3, 4)
    assert_close(scores[1, 2], model(tokens[1, 2:3, :5], token_types=types[1, 2:3, :5]).squeeze())


def test_dropout_of_the_classifier_is_drawn_by_the_token_that_is_pooled():
    model = built(
        config(hidden_dropout=0.0, attention_dropout=0.0, bert=classifier("classification", classifier_dropout=0.5))
    )
    tokens = torch.arange(12).view(2, 6)
    ids = torch.arange(12).view(2, 6)
    both = model(tokens, dropout_key=DropoutKey(1, 2, ids))
    alone = model(tokens[1:], dropout_key=DropoutKey(1, 2, ids[1:]))
    assert_close(both[1:], alone)
    assert not torch.allclose(both, model.eval()(tokens))


@pytest.mark.parametrize(
    ("hidden_dropout", "classifier_dropout", "p"), [(0.4, None, 0.4), (0.4, 0.2, 0.2), (0.0, 0.2, 0.2), (0.4, 0.0, 0.0)]
)
@pytest.mark.parametrize("head", ["classification", "multiple_choice"])
def test_a_classifier_drops_as_hidden_states_do_unless_it_has_its_own_probability(
    head, hidden_dropout, classifier_dropout, p
):
    bert = classifier(head, classifier_dropout=classifier_dropout)
    model = built(config(hidden_dropout=hidden_dropout, bert=bert)).train()
    tokens = torch.arange(12).view(2, 6)
    key = DropoutKey(1, 2, tokens + 40)
    pooled = torch.tanh(model.pooler.dense(model(tokens, dropout_key=key, output="hidden")[:, 0]))
    dropped = dropout(pooled, p, DropoutKey(1 ^ name_number("classifier.dropout"), 2, key.tokens[:, 0]))
    assert bool((dropped == 0).any()) == (p > 0)
    found = model(tokens, dropout_key=key)
    assert_close(found, dropped @ model.classifier.linear.weight.t() + model.classifier.linear.bias)


def test_embeddings_are_means_without_first_and_last_tokens():
    model = built(config()).eval()
    S = max(LENGTHS)
    tokens = torch.zeros(len(LENGTHS), S, dtype=torch.long)
    for row, sentence in enumerate(sentences()):
        tokens[row, : LENGTHS[row]] = sentence["tokens"]
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    found = model(tokens, attention_mask=mask, output="embeddings")
    hidden = model(tokens, attention_mask=mask, output="hidden")
    want = torch.stack([hidden[row, 1 : length - 1].mean(dim=0) for row, length in enumerate(LENGTHS)])
    assert_close(found, want)
    half = BertModel(config(), BuildOptions(ProcessGroupCollection.single(), torch.bfloat16)).eval()
    assert half(tokens, attention_mask=mask, output="embeddings").dtype == torch.float32


def test_a_text_of_two_tokens_has_an_embedding_of_zeros():
    tokens, mask = torch.arange(8).view(2, 4), torch.tensor([[True, True, False, False], [False] * 4])
    found = built(config()).eval()(tokens, attention_mask=mask, output="embeddings")
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_a_row_of_nothing_but_padding_is_finite_and_has_no_effect_on_other_rows(fields):
    model = built(config(**fields)).eval()
    S = max(LENGTHS)
    tokens = torch.randint(VOCAB, (3, S), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(S) < torch.tensor([5, 0, S])[:, None]
    found, want = (model(tokens[rows], attention_mask=mask[rows], labels=tokens[rows]) for rows in ([0, 1, 2], [0, 2]))
    of_texts = None if want.binary_logits is None else found.binary_logits[[0, 2]]
    assert_close(found.predictions[[0, 2]], want.predictions)
    assert_close(of_texts, want.binary_logits)
    wanted = gradients(model, [want.predictions], [want.binary_logits])
    assert_close(gradients(model, [found.predictions[[0, 2]]], [of_texts], retain_graph=True), wanted)
    of_all = gradients(model, [found.predictions], [found.binary_logits])
    assert all(each.isfinite().all() for each in (found.predictions, *of_all.values()))


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_stages_compute_what_the_whole_model_does(fields):
    settings = config(**fields | {"num_layers": 3})
    whole = built(settings)
    first = built(settings, stage=Stage(0, 1, has_embedding=True, has_head=False))
    last = built(settings, stage=Stage(1, 3, has_embedding=False, has_head=True))
    tokens = torch.arange(12).view(2, 6)
    batch = {"dropout_key": DropoutKey(1, 2, tokens), "token_types": tokens % 2 if fields.get("bert") is None else None}
    want = whole(tokens, labels=tokens, **batch)
    found = last(tokens, labels=tokens, hidden=first(tokens, **batch), **batch)
    assert torch.equal(found.predictions, want.predictions)
    assert want.binary_logits is None or torch.equal(found.binary_logits, want.binary_logits)
    assert len(first.shared_weights()) == len(last.copied_weights()) == settings.tie_word_embeddings


def test_the_order_of_tokens_is_seen_both_ways():
    model = built(config()).eval()
    tokens = torch.arange(8).view(1, 8)
    other = tokens.clone()
    other[0, 7] = 60
    assert not torch.allclose(model(tokens).predictions[0, 0], model(other).predictions[0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[True, False, True, True]])}, "padding between"),
        (
            {"attention_mask": torch.ones(1, 4).bool(), "packed_seq_params": PackedSeqParams.from_lengths([[4]])},
            "cannot be combined with packed_seq_params .*; pass only packed_seq_params",
        ),
        (
            {"packed_seq_params": PackedSeqParams.from_lengths([[5]])},
            r"must have the tokens' batch size and row length, \[1, 4\]",
        ),
        ({"hidden": torch.zeros(4, 1, 32)}, "takes no hidden states"),
        ({"labels": torch.zeros(1, 3).long()}, r"labels must have the shape of the tokens, \[1, 4\]; got \[1, 3\]"),
        ({"tokens": torch.zeros(1, 2, 4).long()}, r"must be \[B, S\]; got \[1, 2, 4\]; only bert.head=multiple_choice"),
        (
            {"attention_mask": torch.ones(1, 5).bool()},
            r"attention_mask must be bool with the shape of the tokens, \[1, 4\].*got .* \[1, 5\]",
        ),
        (
            {"attention_mask": torch.ones(1, 4).long()},
            r"got torch.int64 \[1, 4\]; convert .* with attention_mask.bool\(\)",
        ),
        (
            {"output": "embeddings", "packed_seq_params": PackedSeqParams.from_lengths([[2, 2]])},
            "packed rows hold several; pass attention_mask",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ShapeError, match=message):
        built(config())(**{"tokens": torch.arange(4).view(1, 4)} | arguments)


@pytest.mark.parametrize(
    ("bert", "arguments", "message"),
    [
        (
            {"num_token_types": 0},
            {"token_types": torch.zeros(1, 4).long()},
            "no token types .model.bert.num_token_types=0.; leave",
        ),
        (
            {"num_token_types": 2, "head": "classification", "num_classes": 3},
            {"labels": torch.zeros(1, 4).long()},
            "labels are only for bert.head=pretraining; bert.head=classification returns logits",
        ),
    ],
)
def test_what_the_model_has_no_use_for_is_refused(bert, arguments, message):
    with pytest.raises(ShapeError, match=message):
        built(config(bert=bert))(torch.arange(4).view(1, 4), **arguments)


def test_embeddings_under_context_parallelism_are_refused(monkeypatch):
    model = built(config())
    monkeypatch.setattr(ProcessGroupCollection, "size", lambda _, axis: 2 if axis == "cp" else 1)
    with pytest.raises(ShapeError, match=r"no rank holds whole rows to average; set parallel\.context=1"):
        model(torch.arange(4).view(1, 4), output="embeddings")


def test_rows_longer_than_the_table_of_positions_are_refused():
    for offset in (0, 2):
        model = built(config(bert={"num_token_types": 2, "position_offset": offset})).eval()
        model(torch.zeros(1, 16, dtype=torch.long))
        with pytest.raises(ShapeError, match="17 positions exceed max_position_embeddings"):
            model(torch.zeros(1, 17, dtype=torch.long))


def test_a_model_is_not_built_from_the_settings_of_another_kind():
    with pytest.raises(ConfigError, match="GPTModel needs settings of a gpt model; got settings of a bert model"):
        GPTModel(config())
    with pytest.raises(ConfigError, match="BertModel needs settings of a bert model; got settings of a gpt model"):
        BertModel(TransformerConfig(**GPT2, max_position_embeddings=8))
