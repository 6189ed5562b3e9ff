"""Encoders of models/hf: names, numbers and configs against transformers' models."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForSequenceClassification,
    MegatronBertConfig,
    MegatronBertForMaskedLM,
    MegatronBertForMultipleChoice,
    MegatronBertForPreTraining,
    MegatronBertForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RoFormerConfig,
    RoFormerForMaskedLM,
    RoFormerForSequenceClassification,
)

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.bert_model import BertModel
from megalith.models.hf import Family, detect, fitting, open_folder
from megalith.models.hf.bert import BERT_CLASSIFICATION, BERT_MASKED_LM, BERT_MULTIPLE_CHOICE, BERT_PRETRAINING
from megalith.models.hf.megatron_bert import (
    MEGATRON_BERT_CLASSIFICATION,
    MEGATRON_BERT_MASKED_LM,
    MEGATRON_BERT_MULTIPLE_CHOICE,
    MEGATRON_BERT_PRETRAINING,
)
from megalith.models.hf.roberta import ROBERTA_CLASSIFICATION, ROBERTA_MASKED_LM
from megalith.models.hf.roformer import ROFORMER_CLASSIFICATION, ROFORMER_MASKED_LM
from tests.models.hf import peers
from tests.models.test_bert_model import config as of_ours

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One of our families, their model, and fields that its config.json may have."""

    family: Family
    model: type[PreTrainedModel]
    config: type[PretrainedConfig]
    fields: dict[str, Any]

    def build(self, **fields: Any) -> PreTrainedModel:
        config = self.config(**SHAPE | self.fields | fields, architectures=[self.family.architecture])
        return peers.randomized(self.model(config)).eval()


ONE_TYPE = {"type_vocab_size": 1}
CASES = {
    "bert": Case(BERT_PRETRAINING, BertForPreTraining, BertConfig, {}),
    "bert, another activation": Case(BERT_PRETRAINING, BertForPreTraining, BertConfig, {"hidden_act": "gelu_new"}),
    "bert, odd sizes": Case(
        BERT_PRETRAINING, BertForPreTraining, BertConfig, {"hidden_size": 33, "num_attention_heads": 3}
    ),
    "bert, masked tokens": Case(BERT_MASKED_LM, BertForMaskedLM, BertConfig, {"hidden_act": "relu"}),
    "bert, classes": Case(BERT_CLASSIFICATION, BertForSequenceClassification, BertConfig, {"num_labels": 5}),
    "bert, choices": Case(BERT_MULTIPLE_CHOICE, BertForMultipleChoice, BertConfig, {}),
    "roberta": Case(ROBERTA_MASKED_LM, RobertaForMaskedLM, RobertaConfig, ONE_TYPE),
    "roberta, another padding": Case(ROBERTA_MASKED_LM, RobertaForMaskedLM, RobertaConfig, {"pad_token_id": 0}),
    "roberta, classes": Case(
        ROBERTA_CLASSIFICATION, RobertaForSequenceClassification, RobertaConfig, {**ONE_TYPE, "num_labels": 3}
    ),
    "pre-norm": Case(MEGATRON_BERT_PRETRAINING, MegatronBertForPreTraining, MegatronBertConfig, {}),
    "pre-norm, odd sizes, masked tokens": Case(
        MEGATRON_BERT_MASKED_LM,
        MegatronBertForMaskedLM,
        MegatronBertConfig,
        {"hidden_size": 33, "num_attention_heads": 3, "num_hidden_layers": 3, "hidden_act": "gelu_new"},
    ),
    "pre-norm, classes": Case(
        MEGATRON_BERT_CLASSIFICATION, MegatronBertForSequenceClassification, MegatronBertConfig, {"num_labels": 3}
    ),
    "pre-norm, choices": Case(MEGATRON_BERT_MULTIPLE_CHOICE, MegatronBertForMultipleChoice, MegatronBertConfig, {}),
    "rotary": Case(ROFORMER_MASKED_LM, RoFormerForMaskedLM, RoFormerConfig, {}),
    "rotary, odd sizes": Case(
        ROFORMER_MASKED_LM,
        RoFormerForMaskedLM,
        RoFormerConfig,
        {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 47, "hidden_act": "gelu_new"},
    ),
    "rotary, classes": Case(
        ROFORMER_CLASSIFICATION, RoFormerForSequenceClassification, RoFormerConfig, {"num_labels": 3}
    ),
    "rotary, classes, another activation": Case(
        ROFORMER_CLASSIFICATION, RoFormerForSequenceClassification, RoFormerConfig, {"hidden_act": "relu"}
    ),
}
of_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def ours_of(theirs: PreTrainedModel, family: Family) -> BertModel:
    config = family.config_from_hf(theirs.config.to_dict())
    ours = BertModel(config)
    ours.load_state_dict(family.from_hf(theirs.state_dict(), config))
    return ours.eval()


def batch_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, types, mask, labels [3, 12]; tokens without the padding token, whose embedding theirs would not train."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 61, (3, 12), generator=generator)
    types = torch.randint(case.build().config.type_vocab_size, (3, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    labels = torch.where(torch.rand(3, 12, generator=generator) < 0.4, tokens, -1)
    pad = case.fields.get("pad_token_id", 1) if case.config is RobertaConfig else 0
    return tokens.where(mask, pad), types, mask, labels.where(mask, -1)


def losses_of(case: Case, theirs: PreTrainedModel, ours: BertModel) -> tuple[Tensor, Tensor]:
    """Their loss and ours: the mean over masked tokens, plus the mean over texts."""
    tokens, types, mask, labels = batch_of(case)
    given = {"attention_mask": mask.long(), "token_type_ids": types}
    classes = torch.tensor([1, 0, 1])
    entropy = torch.nn.functional.cross_entropy
    if case.family in (BERT_MULTIPLE_CHOICE, MEGATRON_BERT_MULTIPLE_CHOICE):
        choices = {name: value[None] for name, value in given.items()}
        scores = ours(tokens[None], token_types=types[None], attention_mask=mask[None])
        return theirs(tokens[None], labels=classes[:1], **choices).loss, entropy(scores, classes[:1])
    if ours.head == "classification":
        scores, output = ours(tokens, token_types=types, attention_mask=mask), theirs(tokens, labels=classes, **given)
        torch.testing.assert_close(scores, output.logits, rtol=0, atol=1e-5)
        return output.loss, entropy(scores, classes)
    found = ours(tokens, labels=labels, token_types=types, attention_mask=mask)
    loss, masked = found.predictions.sum() / (labels >= 0).sum(), labels.where(labels >= 0, -100)
    if found.binary_logits is None:
        return theirs(tokens, labels=masked, **given).loss, loss
    both = theirs(tokens, labels=masked, next_sentence_label=classes, **given).loss
    return both, loss + entropy(found.binary_logits, classes)


@of_cases
def test_tensors_come_back_bitwise(case):
    theirs = case.build()
    config = case.family.config_from_hf(theirs.config.to_dict())
    state = theirs.bfloat16().state_dict()
    trained = {key: tensor for key, tensor in state.items() if key not in case.family.tables}
    peers.assert_bitwise(case.family.to_hf(case.family.from_hf(state, config), config), trained)


@of_cases
def test_hidden_states_logits_and_gradients_are_theirs(case):
    theirs = case.build()
    ours = ours_of(theirs, case.family)
    tokens, types, mask, _ = batch_of(case)
    given = {"attention_mask": mask.long(), "token_type_ids": types}
    with torch.no_grad():
        hidden = ours(tokens, token_types=types, attention_mask=mask, output="hidden")
        want = theirs.base_model(tokens, **given).last_hidden_state
        torch.testing.assert_close(hidden[mask], want[mask], rtol=0, atol=1e-5)
        if case.family.head is not None:
            logits, output = ours(tokens, token_types=types, attention_mask=mask), theirs(tokens, **given)
            of_tokens = output.prediction_logits if logits.binary_logits is not None else output.logits
            torch.testing.assert_close(logits.predictions[mask], of_tokens[mask], rtol=0, atol=1e-5)
            if logits.binary_logits is not None:
                torch.testing.assert_close(logits.binary_logits, output.seq_relationship_logits, rtol=0, atol=1e-5)
    loss_there, loss = losses_of(case, theirs, ours)
    torch.testing.assert_close(loss, loss_there, rtol=1e-6, atol=0)
    loss_there.backward()
    loss.backward()
    parameters = theirs.named_parameters(remove_duplicate=False)
    gradients = {name: parameter.grad for name, parameter in parameters if parameter.requires_grad}
    wanted = case.family.from_hf(gradients, ours.config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["bert", "roberta", "roberta, another padding", "roberta, classes"])
def test_texts_that_are_padded_on_the_left_have_the_positions_that_they_have_there(name):
    case = CASES[name]
    theirs = case.build()
    ours = ours_of(theirs, case.family)
    tokens, types, mask, _ = (x.flip(1) for x in batch_of(case))
    assert not mask[1:, 0].any()
    with torch.no_grad():
        hidden = ours(tokens, token_types=types, attention_mask=mask, output="hidden")
        want = theirs.base_model(tokens, attention_mask=mask.long(), token_type_ids=types).last_hidden_state
    torch.testing.assert_close(hidden[mask], want[mask], rtol=0, atol=1e-5)


@of_cases
def test_an_exported_folder_loads_in_transformers_without_warnings_and_can_be_imported_again(
    case, tmp_path, recwarn, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # else caplog sees none of its lines
    theirs, family = case.build(), case.family
    config = family.config_from_hf(theirs.config.to_dict())
    exported = family.config_to_hf(config, max_position_embeddings=24, dtype="float32", eos_token_id=None)
    assert detect(exported) == fitting(config) == family
    assert family.config_from_hf(exported) == config
    state = family.to_hf(family.from_hf(theirs.state_dict(), config), config)
    folder = tmp_path / "model"
    folder.mkdir()
    in_file = {key: tensor for key, tensor in state.items() if key not in family.copies(config)}
    in_file |= family.tables_of(config, exported["max_position_embeddings"])
    save_file(in_file, folder / "model.safetensors", {"format": "pt"})
    case.config(**exported).save_pretrained(folder)
    again, told = case.model.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    assert not caplog.records
    assert [warning.message for warning in recwarn] == []
    peers.assert_bitwise(again.state_dict(), theirs.state_dict())
    back = open_folder(folder)
    assert back.config == config
    peers.assert_bitwise(
        {name: back.weights.read(name) for name in back.weights.tensors}, family.from_hf(state, config)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "silu"}, r"hidden_act must be one of gelu.*got 'silu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"embedding_size": 8}, r"embedding_size \(8\) is a field that Megalith does not know"),
        ({"type_vocab_size": "two"}, "type_vocab_size must be an integer"),
        ({"hidden_size": None}, "lacks required fields: hidden_size"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        BERT_PRETRAINING.config_from_hf(BertConfig(**SHAPE).to_dict() | fields)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_a_classifier_for_several_labels_or_a_regression_is_refused(problem):
    fields = BertConfig(**SHAPE, problem_type=problem, num_labels=3).to_dict()
    with pytest.raises(ConfigError, match=f"problem_type must be 'single_label_classification'.*got '{problem}'"):
        BERT_CLASSIFICATION.config_from_hf(fields)
    assert BERT_CLASSIFICATION.config_from_hf(fields | {"problem_type": None}).bert.num_classes == 3


def test_a_roberta_whose_head_has_another_activation_is_refused():
    with pytest.raises(ConfigError, match="hidden_act must be 'gelu'"):
        ROBERTA_MASKED_LM.config_from_hf(RobertaConfig(**SHAPE, hidden_act="relu").to_dict())


def test_a_dropout_that_their_classifier_does_not_have_is_refused():
    fields = {**MegatronBertConfig(**SHAPE).to_dict(), "classifier_dropout": 0.3}
    with pytest.raises(ConfigError, match="classifier_dropout must be absent: the transformers classifiers use hidden"):
        MEGATRON_BERT_CLASSIFICATION.config_from_hf(fields)
    ours = of_ours(residual={}, bert={"num_token_types": 2, "head": "classification", "num_classes": 2})
    MEGATRON_BERT_CLASSIFICATION.require(ours)
    dropped = of_ours(
        residual={}, bert={"num_token_types": 2, "head": "classification", "num_classes": 2, "classifier_dropout": 0.3}
    )
    with pytest.raises(ConfigError, match=r"bert.classifier_dropout must be None; got 0.3"):
        MEGATRON_BERT_CLASSIFICATION.require(dropped)


def test_an_unsupported_architecture_is_refused():
    wanted = "architectures in config.json .* must be BertForPreTraining or .* or BertModel, which"
    with pytest.raises(ConfigError, match=rf"{wanted}.*; got \['BertLMHeadModel'\]"):
        detect({"model_type": "bert", "architectures": ["BertLMHeadModel"]})


def test_absent_fields_have_the_defaults_of_transformers():
    required = {name: SHAPE[name] for name in BERT_PRETRAINING.sizes}
    for kind, family, config in (
        ("bert", BERT_MASKED_LM, BertConfig),
        ("roberta", ROBERTA_MASKED_LM, RobertaConfig),
        ("roformer", ROFORMER_MASKED_LM, RoFormerConfig),
    ):
        assert family.config_from_hf({"model_type": kind} | required) == family.config_from_hf(
            config(**required).to_dict()
        )


def test_files_with_the_names_of_old_versions_are_read():
    theirs = CASES["bert"].build()
    config = BERT_PRETRAINING.config_from_hf(theirs.config.to_dict())
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in theirs.state_dict().items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    want = BERT_PRETRAINING.from_hf(theirs.state_dict(), config)
    peers.assert_bitwise(BERT_PRETRAINING.from_hf(old, config), want)


def test_a_bias_that_differs_from_its_other_name_is_refused():
    theirs = CASES["bert"].build()
    config = BERT_PRETRAINING.config_from_hf(theirs.config.to_dict())
    state = theirs.state_dict() | {"cls.predictions.decoder.bias": torch.ones(61)}
    with pytest.raises(CheckpointError, match=r"decoder\.bias must equal cls\.predictions\.bias, .* but differs"):
        BERT_PRETRAINING.from_hf(state, config)


def no_bert() -> TransformerConfig:
    return TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_bert, r"norm_placement must be 'post'"),
        (lambda: of_ours(residual={}), r"norm_placement must be 'post'; got 'pre'"),
        (lambda: of_ours(tie_word_embeddings=False), r"tie_word_embeddings must be True; got False"),
        (lambda: of_ours(bert={"num_token_types": 0}), r"bert.num_token_types must be 1; got 0"),
        (lambda: of_ours(attention={"window": 3}), r"attention.window must be None; got 3"),
        (
            lambda: of_ours(bert={"num_token_types": 2, "binary_head": False}),
            r"bert.binary_head must be True; got False",
        ),
        (lambda: of_ours(bert={"num_token_types": 2, "position_offset": 2}), r"position_offset must be 0; got 2"),
    ],
)
def test_a_model_that_is_none_of_theirs_is_not_written_as_one(build: Callable[[], TransformerConfig], message):
    with pytest.raises(ConfigError, match=message):
        BERT_PRETRAINING.require(build())
