"""Encoders to Hugging Face and back: the proof of their logits, every bit, and what goes with their tokenizer."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.data.tokenizer import Tokenizer
from megalith.models.hf import open_folder
from megalith.training.inference import load_model
from megalith.training.pretrain import pretrain
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.conversion.logit_proof import LogitProof
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.training.tasks.test_finetune_classification import labelled_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings

transformers = pytest.importorskip("transformers")

SETTINGS = {
    "pretraining": masked_settings,
    "pre-norm": partial(masked_settings, model={"residual": {}}),
    "classification": labelled_settings,
    "t5": t5_settings,
}
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}


def train(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree), str, str)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_comes_back_from_hugging_face_bit_for_bit(kind, tmp_path):
    tree = SETTINGS[kind](tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    tree["run"] = str(tmp_path / "run")
    ranks(1, train, tree)
    exported = export_model(tmp_path / "run", tmp_path / "hf")
    assert isinstance(exported.proof, LogitProof)
    assert exported.proof.max_abs_difference < 1e-5
    imported = import_model(tmp_path / "hf", tmp_path / "back")
    assert isinstance(imported.proof, LogitProof)
    before, after = (dict(load_model(tmp_path / name).model.named_parameters()) for name in ("run", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("kind", "special"), [("pretraining", SPECIAL), ("t5", {"pad_token": "<pad>"})])
def test_the_folder_names_the_special_tokens(kind, special, tmp_path):
    tree = SETTINGS[kind](tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    tree["run"] = str(tmp_path / "run")
    ranks(1, train, tree)
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert {role: getattr(theirs, role) for role in special} == special
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    padding = Tokenizer.load(tmp_path / "hf" / "tokenizer.json").token_id(special["pad_token"])
    assert config["pad_token_id"] == padding
    if kind == "t5":
        model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf")
        assert model.config.decoder_start_token_id == padding
        assert model(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[7, 8]])).loss.isfinite()


def test_a_model_that_no_task_trains_is_proven_too(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    folder = Path(tmp_path / "hf")
    transformers.BertForMultipleChoice(config).save_pretrained(folder)
    found = import_model(folder, tmp_path / "run")
    assert isinstance(found.proof, LogitProof)
    assert open_folder(folder).config.bert is not None
