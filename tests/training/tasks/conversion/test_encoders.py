"""Encoders to Hugging Face and back: the proof of their logits, every bit, and files of the tokenizer."""

import json
import logging
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalith.config import TransformerConfig, load_run
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.models.hf import open_folder
from megalith.training.inference import evaluate_checkpoint, load_model
from megalith.training.pretrain import pretrain
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.conversion.logit_proof import LogitProof
from megalith.training.tasks.origin import settings_from
from tests.program import here
from tests.rank_pool import ranks
from tests.tiny_masked import SEQ, masked_settings
from tests.training.tasks.test_finetune_classification import labelled_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings

transformers = pytest.importorskip("transformers")

ROTARY: dict[str, Any] = {
    "position_embedding_type": "rope",
    "max_position_embeddings": None,
    "rope": {"interleaved": True},
}


def rotary_classifier(folder: Path, **groups: Any) -> dict[str, Any]:
    tree = labelled_settings(folder, **groups, model=ROTARY)
    return {**tree, "model": {**tree["model"], "bert": {**tree["model"]["bert"], "classifier_activation": "gelu"}}}


def rotary(binary_head: bool = True, **groups: Any) -> dict[str, Any]:
    return {"model": {**ROTARY, "bert": {"num_token_types": 2, "binary_head": binary_head}}, **groups}


OF_ROBERTA: dict[str, Any] = {"num_token_types": 1, "binary_head": False, "position_offset": 2}
SETTINGS = {
    "pretraining": masked_settings,
    "pre-norm": partial(masked_settings, model={"residual": {}}),
    "rotary": partial(masked_settings, **rotary(binary_head=False)),
    "roberta": partial(masked_settings, model={"bert": OF_ROBERTA, "init_method_std": 0.3}),
    "classification": labelled_settings,
    "rotary, classification": rotary_classifier,
    "t5": t5_settings,
    "t5, plain, scaled logits": partial(
        t5_settings, model={"activation": "relu", "multipliers": {"logits": 32**-0.5}, "init_method_std": 0.1}
    ),
    "t5, a head of its own": partial(t5_settings, model={"activation": "geglu_tanh", "tie_word_embeddings": False}),
}
HEADS_OF_TEXTS = ("pooler.dense", "binary_head.linear")
SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}


def train_on(world_size: int, tree: dict[str, Any]) -> None:
    pretrain(load_run(tree, world_size=world_size), str, str)


def train(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree), str, str)


# one of each of their architectures, one of them with a classifier
IN_MAKE_TEST = ("pretraining", "roberta", "rotary, classification", "t5")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_MAKE_TEST else pytest.mark.slow) for kind in SETTINGS]
)
def test_a_run_comes_back_from_hugging_face_bit_for_bit_and_loads_there_without_a_warning(
    kind, tmp_path, caplog, monkeypatch
):
    tree = SETTINGS[kind](tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    tree["run"] = str(tmp_path / "run")
    ranks(1, train, tree)
    exported = export_model(tmp_path / "run", tmp_path / "hf")
    assert isinstance(exported.proof, LogitProof)
    assert exported.proof.max_abs_difference < 1e-5
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    there = getattr(transformers, exported.family.architecture)
    _, told = there.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    # its configs tie every T5, and it warns about each that has its own head, as the published FLAN-T5s have
    known = "The tied weights mapping and config for this model" if kind == "t5, a head of its own" else None
    told = {record.getMessage() for record in caplog.records if record.name.startswith("transformers")}
    assert not {message for message in told if known is None or not message.startswith(known)}
    imported = import_model(tmp_path / "hf", tmp_path / "back")
    assert isinstance(imported.proof, LogitProof)
    before, after = (dict(load_model(tmp_path / name).model.named_parameters()) for name in ("run", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ours, back = (evaluate_checkpoint(tmp_path / name, tree["data"]["train"], 8)[0].means for name in ("run", "back"))
    # a T5 folder has no length, so its samples are longer
    assert back.keys() == ours.keys() if "t5" in kind else back == pytest.approx(ours, rel=1e-6)


def test_a_proof_does_not_pass_on_what_transformers_says_of_every_untied_t5(tmp_path, caplog, monkeypatch):
    tree = SETTINGS["t5, a head of its own"](tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for found in (export_model(tmp_path / "run", tmp_path / "hf"), import_model(tmp_path / "hf", tmp_path / "back")):
        assert isinstance(found.proof, LogitProof)
    assert "tied weights mapping" not in caplog.text
    transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "hf")
    assert "tied weights mapping" in caplog.text


def test_a_roberta_of_theirs_is_proven_whatever_token_it_pads_with(tmp_path):
    torch.manual_seed(0)
    for padding in (0, 1, 5):
        config = transformers.RobertaConfig(
            vocab_size=67,  # random tokens are padding now and then
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=70,
            initializer_range=0.3,
            pad_token_id=padding,
            bos_token_id=None,
            eos_token_id=None,
        )
        transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / f"hf-{padding}")
        found = import_model(tmp_path / f"hf-{padding}", tmp_path / f"run-{padding}")
        assert isinstance(found.proof, LogitProof)
        exported = export_model(tmp_path / f"run-{padding}", tmp_path / f"back-{padding}")
        assert isinstance(exported.proof, LogitProof)


def test_positions_that_theirs_would_count_otherwise_are_refused(tmp_path):
    bert = OF_ROBERTA | {"position_offset": 4}
    tree = masked_settings(tmp_path / "text", train={"steps": 1}, model={"bert": bert})
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"pads with token 1, but .*=4 needs 3; train with .*position_offset=2"):
        export_model(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("kind", "special"), [("pretraining", SPECIAL), ("rotary", SPECIAL), ("t5", {"pad_token": "<pad>"})]
)
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


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "dtype"),
    [
        (1, {}, "bfloat16"),
        pytest.param(2, {"tensor": 2}, "float32", marks=pytest.mark.slow),
        (2, {"pipeline": 2}, "float32"),
    ],
)
def test_the_binary_head_that_a_roformer_lacks_is_left_out_and_told(
    num_ranks, parallel, dtype, tmp_path, caplog, monkeypatch
):
    precision = {"dtype": dtype}
    tree = masked_settings(tmp_path / "text", **rotary(parallel=parallel, precision=precision, train={"steps": 2}))
    tree["run"] = str(tmp_path / "run")
    ranks(num_ranks, train_on, num_ranks, tree)
    found = here("convert", "export", tmp_path / "run", "--out", tmp_path / "hf")
    assert found.code == 0, found
    assert "\nleft out   the binary head and its pooler, which RoFormerForMaskedLM does not have and" in found.out
    assert "\nproof      logits of 64 random tokens" in found.out
    assert f'\nnext: transformers.RoFormerForMaskedLM.from_pretrained("{tmp_path / "hf"}")' in found.out
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    theirs, told = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").mask_token == "[MASK]"
    assert [record.getMessage() for record in caplog.records] == []
    assert theirs.config.max_position_embeddings == SEQ
    imported = import_model(tmp_path / "hf", tmp_path / "back")
    assert isinstance(imported.proof, LogitProof)
    before, after = (load_model(tmp_path / name).model.state_dict() for name in ("run", "back"))
    assert {*before} - {*after} == {f"{head}.{part}" for head in HEADS_OF_TEXTS for part in ("weight", "bias")}
    assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in after)


def test_a_roformer_that_transformers_wrote_is_fine_tuned_and_exported_in_any_layout(tmp_path):
    pretraining = masked_settings(tmp_path / "text", train={"steps": 1}, **rotary(precision={"dtype": "float32"}))
    ranks(1, train_on, 1, {**pretraining, "run": str(tmp_path / "run")})
    export_model(tmp_path / "run", tmp_path / "ours", with_proof=False)
    theirs = transformers.RoFormerForMaskedLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "hf")
    source = rotary_classifier(tmp_path / "text", train={"steps": 1}, parallel={"tensor": 2}, optim={"lr": 1e-30})
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump({**source, "run": str(tmp_path / "tuned")}))
    ranks(2, train_on, 2, settings_from(str(tmp_path / "hf"), tmp_path / "tuned.yaml"))
    exported = export_model(tmp_path / "tuned", tmp_path / "out", "float32")
    assert isinstance(exported.proof, LogitProof)
    assert exported.family.architecture == "RoFormerForSequenceClassification"
    assert exported.left_out == ()
    again = transformers.RoFormerForSequenceClassification.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():  # after a step at a learning rate of 1e-30
        hidden, want = again.base_model(tokens).last_hidden_state, theirs.base_model(tokens).last_hidden_state
    torch.testing.assert_close(hidden, want, rtol=0, atol=1e-6)


def test_an_imported_t5_names_the_prompt_of_one_that_fills_gaps(tmp_path):
    tree = t5_settings(tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    back = tmp_path / "back"
    found = here("convert", "import", tmp_path / "hf", "--out", back, "--no-proof")
    [_, *arguments] = shlex.split(found.out.splitlines()[-1].removeprefix("next: ").split(", or ")[0])
    assert arguments == ["generate", str(back), "--special-tokens", "--prompt", "Once <extra_id_0> name."]
    assert here(*arguments, "--max-new-tokens", 2).code == 0


@pytest.mark.parametrize("kind", ["pretraining", "classification"])
def test_the_commands_that_an_import_names_run(kind, tmp_path):
    tree = SETTINGS[kind](tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    labelled = labelled_settings(tmp_path / "text")["data"]["train"]
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    found = here("convert", "import", tmp_path / "hf", "--out", tmp_path / "back", "--no-proof")
    named = found.out.splitlines()[-1].removeprefix("next: ").split(", or ")
    evaluation, tuning = (command.split()[1:] for command in named)
    assert (evaluation[0], tuning[:2]) == ("eval", ["train", "classification-tiny"])
    evaluated = here(*evaluation[:-1], tree["data"]["train"], "--samples", 2)
    assert evaluated.code == 0, evaluated
    filled = [part.replace("=PREFIX", f"={labelled}").replace("=N", "=3") for part in tuning]
    short = ["train.steps=1", "train.global_batch_size=4", "optim.warmup_steps=0", f"data.seq_length={SEQ}"]
    tuned = here(*filled, *short, f"run={tmp_path / 'tuned'}")
    assert tuned.code == 0, tuned
    assert here("convert", "export", tmp_path / "tuned", "--out", tmp_path / "tuned-hf", "--no-proof").code == 0


def test_an_import_names_only_commands_that_can_use_it(tmp_path):
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    for name in ("BertForMultipleChoice", "BertForMaskedLM"):
        getattr(transformers, name)(config).save_pretrained(tmp_path / name)
        run = tmp_path / f"run-{name}"
        found = here("convert", "import", tmp_path / name, "--out", run, "--no-proof")
        pooling = "" if name == "BertForMultipleChoice" else " model.bert.classifier_pooling=first"  # of a new pooler
        assert found.out.splitlines()[-1] == (  # without a tokenizer nothing can be evaluated
            f"next: megalith train classification-tiny --from {run} data.train=PREFIX model.bert.num_classes=N{pooling}"
        )


def test_an_exported_classifier_names_its_classes(tmp_path):
    tree = labelled_settings(tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    config = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "hf").config
    assert config.id2label == {0: "colour", 1: "number", 2: "place"}
    assert config.label2id == {"colour": 0, "number": 1, "place": 2}
    import_model(tmp_path / "hf", tmp_path / "back", with_proof=False)
    export_model(tmp_path / "back", tmp_path / "again", with_proof=False)
    config = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "again").config
    assert config.id2label == {0: "colour", 1: "number", 2: "place"}


def test_classes_without_names_are_numbered(tmp_path):
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "back", with_proof=False)
    config = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "back").config
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "RoFormer", "MegatronBert"])
def test_a_head_for_regression_is_refused_with_a_way_to_its_encoder(kind, tmp_path):
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, intermediate_size=48, num_labels=1)
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match="at least 2 classes; got 1, and a head for regression is not") as refusal:
        open_folder(tmp_path / "hf")
    assert "transformers.AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(OTHER" in str(refusal.value)
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "other")
    assert open_folder(tmp_path / "other").config.bert.head == "pretraining"


def test_a_classifier_of_theirs_is_trained_on_with_the_pooling_and_activation_that_it_has(tmp_path):
    config = transformers.RoFormerConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, num_labels=3
    )
    transformers.RoFormerForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    bert = {"num_token_types": 2, "head": "classification", "num_classes": 3}
    for given in ({}, {"classifier_pooling": "mean", "classifier_activation": "relu"}):  # only for a new pooler
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": {"bert": bert | given}}))
        read = TransformerConfig(**settings_from(str(tmp_path / "hf"), tmp_path / "recipe.yaml")["model"]).bert
        assert (read.classifier_pooling, read.classifier_activation) == ("first", "gelu")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": {"bert": {"head": "pretraining"}}}))
    assert "classifier_activation" not in settings_from(str(tmp_path / "hf"), tmp_path / "recipe.yaml")["model"]["bert"]


def test_a_folder_in_half_precision_whose_table_transformers_rounded_is_proven(tmp_path):
    torch.manual_seed(0)
    config = transformers.RoFormerConfig(
        vocab_size=67,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,  # so that logits depend on positions
    )
    transformers.RoFormerForMaskedLM(config).bfloat16().save_pretrained(tmp_path / "hf")
    found = import_model(tmp_path / "hf", tmp_path / "run")
    assert isinstance(found.proof, LogitProof)
    assert found.folder.weights.dtype == "bfloat16"


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
