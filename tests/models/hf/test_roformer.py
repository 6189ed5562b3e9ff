"""models/hf/roformer: what only theirs has, the table of sin and cos, and models that do not fit theirs.

test_bert.py compares names, numbers and folders with transformers.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import RoFormerConfig, RoFormerForMaskedLM

from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import detect, fitting, open_folder
from megalith.models.hf.bert import BERT_PRETRAINING
from megalith.models.hf.roformer import ROFORMER_CLASSIFICATION, ROFORMER_MASKED_LM
from tests.models.hf.test_bert import SHAPE
from tests.models.test_bert_model import config as of_ours

TABLE = "roformer.encoder.embed_positions.weight"
ROTARY = {"position_embedding_type": "rope", "max_position_embeddings": None, "rope": {"interleaved": True}}
CLASSES = {"num_token_types": 2, "head": "classification", "num_classes": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_value": True}, "rotary_value must be False, the only supported value; got True"),
        ({"embedding_size": 16}, r"embedding_size must equal hidden_size \(32\) or be absent; got 16"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"hidden_act": "silu"}, "hidden_act must be one of gelu.*got 'silu'"),
        (
            {"classifier_dropout": 0.1},
            "classifier_dropout must be absent: the transformers classifier uses hidden_dropout",
        ),
        ({"rope_theta": 500000.0}, r"rope_theta \(500000.0\) is a field that Megalith does not know"),
        (
            {"num_attention_heads": 32},
            r"kv_channels \(1\), the number of features that rope rotates in a head, must be even",
        ),
        ({"max_position_embeddings": 24.0}, "max_position_embeddings must be an integer; got 24.0"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    given = RoFormerConfig(**SHAPE).to_dict() | fields
    with pytest.raises(ConfigError, match=message):
        ROFORMER_MASKED_LM.config_from_hf(given)


@pytest.mark.parametrize("other", ["RoFormerForMultipleChoice", "RoFormerForCausalLM"])
def test_other_heads_are_refused_by_name(other):
    with pytest.raises(ConfigError, match=f"RoFormerForMaskedLM or .* or RoFormerModel, which .*'{other}'"):
        detect({"model_type": "roformer", "architectures": [other]})


def saved(folder, dtype=torch.float32):
    """Saves their model; returns the folder and its tensors."""
    torch.manual_seed(0)
    RoFormerForMaskedLM(RoFormerConfig(**SHAPE)).to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_table_that_is_rounded_or_absent_is_read(dtype, tmp_path):
    tensors = saved(tmp_path, dtype)
    assert tensors[TABLE].dtype == dtype
    with_table = open_folder(tmp_path)
    assert TABLE not in with_table.weights.tensors
    del tensors[TABLE]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_folder(tmp_path).config == with_table.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.index_put((torch.tensor(20), torch.tensor(3)), torch.tensor(0.5)),
            "differs from the table",
        ),
        (lambda table: table.index_fill(0, torch.tensor(23), float("nan")), "differs from the table"),
        (lambda table: table.roll(1, 0), r"differs from the table of width 8 .* from position 0 on"),
        (lambda table: table[:, :6].contiguous(), r"must be \[positions, 8\] .* it is \[24, 6\] in F32"),
        (lambda table: table[0], r"it is \[8\] in F32"),
        (lambda table: table.int(), r"it is \[24, 8\] in I32"),
    ],
)
def test_a_table_of_other_values_is_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.models.hf.folder._ROWS", 7)
    tensors = saved(tmp_path)
    open_folder(tmp_path)
    tensors[TABLE] = change(tensors[TABLE])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)


def test_a_table_of_other_values_is_refused_in_memory():
    theirs = RoFormerForMaskedLM(RoFormerConfig(**SHAPE))
    config = ROFORMER_MASKED_LM.config_from_hf(theirs.config.to_dict())
    with pytest.raises(
        CheckpointError, match=f"{TABLE} differs from the table of width 8 that RoFormerForMaskedLM computes"
    ):
        ROFORMER_MASKED_LM.from_hf(theirs.state_dict() | {TABLE: theirs.state_dict()[TABLE].flip(1)}, config)


def test_the_written_table_is_theirs_over_thousands_of_positions():
    theirs = RoFormerForMaskedLM(RoFormerConfig(**SHAPE | {"max_position_embeddings": 5000, "num_attention_heads": 1}))
    config = ROFORMER_MASKED_LM.config_from_hf(theirs.config.to_dict())
    found = ROFORMER_MASKED_LM.tables_of(config, 5000)[TABLE]
    torch.testing.assert_close(found, theirs.state_dict()[TABLE], rtol=0, atol=1e-7)


def test_a_binary_head_is_no_part_of_what_is_written():
    ours = of_ours(**ROTARY)
    assert ours.bert.binary_head
    assert fitting(ours) == ROFORMER_MASKED_LM
    written = ROFORMER_MASKED_LM.written(ours)
    assert not any("pooler" in key or "seq_relationship" in key for key in ROFORMER_MASKED_LM.packed(written))
    assert fitting(of_ours()) == BERT_PRETRAINING
    assert BERT_PRETRAINING.written(of_ours()).bert.binary_head


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope": {}}, r"rope.interleaved must be True; got False\nto export .* model.rope.interleaved=true"),
        ({"rope": {"interleaved": True, "base": 500000.0}}, r"rope.base must be 10000.0; got 500000.0"),
        ({"rope": {"interleaved": True, "percent": 0.5}}, r"rope.percent must be 1.0; got 0.5"),
        ({"residual": {}}, r"residual.norm_placement must be 'post'; got 'pre'"),
        (
            {"bert": CLASSES},
            r"bert.classifier_activation must be 'gelu'; got 'tanh'\nto export .* model.bert.classifier_activation",
        ),
        (
            {"bert": CLASSES | {"classifier_activation": "gelu", "classifier_pooling": "mean"}},
            r"bert.classifier_pooling must be 'first'; got 'mean'\nto export .* model.bert.classifier_pooling=first",
        ),
        (
            {"bert": CLASSES | {"classifier_activation": "gelu", "classifier_dropout": 0.3}},
            r"bert.classifier_dropout must be None; got 0.3",
        ),
    ],
)
def test_what_theirs_lacks_is_refused_with_a_way_out(fields, message):
    with pytest.raises(ConfigError, match=rf"(?s)the closest:\nRoFormer[^\n]*:\n- {message}"):
        fitting(of_ours(**ROTARY | fields))


def test_a_classifier_with_the_activation_of_its_layers_is_theirs():
    ours = of_ours(**ROTARY, bert=CLASSES | {"classifier_activation": "gelu"})
    assert fitting(ours) == ROFORMER_CLASSIFICATION
    learned = of_ours(bert=CLASSES | {"classifier_activation": "gelu"})
    with pytest.raises(ConfigError, match=r"bert.classifier_activation must be 'tanh'; got 'gelu'\nto export a model"):
        fitting(learned)
