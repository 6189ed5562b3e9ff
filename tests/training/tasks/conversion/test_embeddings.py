"""Embedding models to sentence-transformers and back: the proof, every bit, files beside the encoder, and --from."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megalith.config import TransformerConfig, load_run
from megalith.errors import CheckpointError
from megalith.models.hf import open_folder
from megalith.training.inference import load_model
from megalith.training.tasks.conversion import export_model, import_model, prove
from megalith.training.tasks.conversion.logit_proof import LogitProof
from megalith.training.tasks.origin import settings_from
from tests.models.hf.sentences import change, encoder, their_embeddings, write_sentence_model
from tests.program import here
from tests.rank_pool import ranks
from tests.tiny_pairs import embedding_settings
from tests.training.tasks.conversion.test_encoders import ROTARY, train, train_on

transformers = pytest.importorskip("transformers")

WIDE: dict[str, Any] = {"init_method_std": 0.3}  # so that embeddings depend on everything
# architecture -> settings of the model and of model.bert
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertModel": ({}, {"embedding_size": 8}),
    "RobertaModel": ({}, {"num_token_types": 1, "position_offset": 2, "embedding_pooling": "first"}),
    "RoFormerModel": (ROTARY, {"embedding_size": 8, "normalize_embeddings": False}),
    "MegatronBertModel": ({"residual": {}}, {}),
}
IN_MAKE_TEST = ("BertModel", "RoFormerModel")
of_architectures = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in SETTINGS]
)


def settings_of(folder: Path, architecture: str = "BertModel", **groups: Any) -> dict[str, Any]:
    model, bert = SETTINGS[architecture]
    plain = {"train": {"steps": 1}, "precision": {"dtype": "float32"}, **groups}
    return embedding_settings(folder / "text", bert, **plain, model={**WIDE, **model})


def trained(folder: Path, architecture: str = "BertModel") -> dict[str, Any]:
    """Trains ``folder / "run"`` for a step; returns its settings."""
    tree = settings_of(folder, architecture)
    ranks(1, train, {**tree, "run": str(folder / "run")})
    return tree


def texts_of(folder: Path) -> torch.Tensor:
    """Tokens [4, 9] without padding, for the model in ``folder``."""
    last = open_folder(folder).config.vocab_size
    return torch.randint(6, last, (4, 9), generator=torch.Generator().manual_seed(4))


@of_architectures
def test_a_run_comes_back_bit_for_bit_and_its_encoder_loads_without_a_warning(
    architecture, tmp_path, caplog, monkeypatch
):
    trained(tmp_path, architecture)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    exported = export_model(tmp_path / "run", tmp_path / "hf")
    assert exported.family.architecture == architecture
    imported = import_model(tmp_path / "hf", tmp_path / "back")
    for proof in (exported.proof, imported.proof):
        assert isinstance(proof, LogitProof)
        assert str(proof).startswith("embeddings of 64 random tokens differ by ")
        assert proof.max_abs_difference < 1e-5
    assert json.loads((tmp_path / "hf" / "proof.json").read_text())["compared"] == "embeddings"
    there = getattr(transformers, architecture)
    without = {} if architecture == "RoFormerModel" else {"add_pooling_layer": False}
    theirs, told = there.from_pretrained(tmp_path / "hf", output_loading_info=True, **without)
    assert not any(told.values()), told
    assert not [record for record in caplog.records if record.name.startswith("transformers")]
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "hf")) is there
    before, after = (load_model(tmp_path / name).model for name in ("run", "back"))
    ours, again = dict(before.named_parameters()), dict(after.named_parameters())
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    tokens, bert = texts_of(tmp_path / "hf"), before.config.bert
    with torch.no_grad():
        hidden = theirs.eval()(tokens).last_hidden_state
        pooling = {"first": "cls", "mean": "mean"}[bert.embedding_pooling]
        how = (pooling, bert.embedding_size, bert.normalize_embeddings)
        want = their_embeddings(hidden, torch.ones_like(tokens), tmp_path / "hf", *how)
        torch.testing.assert_close(before(tokens), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(after(tokens), want, rtol=0, atol=1e-5)


def test_the_files_beside_the_encoder_are_those_of_sentence_transformers(tmp_path):
    trained(tmp_path)
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    found = {
        str(path.relative_to(tmp_path / "hf")): json.loads(path.read_text())
        for path in (tmp_path / "hf").rglob("*.json")
        if "token" not in path.name and path != tmp_path / "hf" / "config.json"
    }
    # as in published folders, such as all-MiniLM-L6-v2 and, for Dense, LaBSE
    names = ("Transformer", "Pooling", "Dense", "Normalize")
    types = [f"sentence_transformers.models.{name}" for name in names]
    assert [entry["type"] for entry in found["modules.json"]] == types
    assert [entry["path"] for entry in found["modules.json"]] == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    assert [(entry["idx"], entry["name"]) for entry in found["modules.json"]] == [(i, str(i)) for i in range(4)]
    assert found["1_Pooling/config.json"] == {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    assert found["2_Dense/config.json"] == {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    assert found["sentence_bert_config.json"] == {"max_seq_length": 32, "do_lower_case": False}
    assert found["config_sentence_transformers.json"]["similarity_fn_name"] == "cosine"
    dense = load_file(tmp_path / "hf" / "2_Dense" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in dense.items()}
    assert shapes == {"linear.weight": (8, 32), "linear.bias": (8,)}
    keys = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert all(key.startswith(("embeddings.", "encoder.")) for key in keys)


def test_embeddings_that_are_not_normalized_are_compared_by_dot_products(tmp_path):
    trained(tmp_path, "RoFormerModel")
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    described = json.loads((tmp_path / "hf" / "config_sentence_transformers.json").read_text())
    assert described["similarity_fn_name"] == "dot"
    assert "Normalize" not in (tmp_path / "hf" / "modules.json").read_text()


def test_lengths_and_prompts_of_a_folder_come_back_and_names_of_code_do_not(tmp_path):
    write_sentence_model(tmp_path / "hf")
    prompts = {"query": "query: ", "passage": "passage: "}
    of_model = {"prompts": prompts, "default_prompt_name": "query", "auto_map": {"AutoModel": "code.Model"}}
    change(tmp_path / "hf", "config_sentence_transformers.json", **of_model)
    change(tmp_path / "hf", "sentence_bert_config.json", max_seq_length=16, do_lower_case=True, cache_dir="/elsewhere")
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    read = [tmp_path / "out" / f"{name}.json" for name in ("sentence_bert_config", "config_sentence_transformers")]
    assert json.loads(read[0].read_text()) == {"max_seq_length": 24, "do_lower_case": False}  # no tokenizer, no texts
    (tmp_path / "hf" / "tokenizer.json").write_bytes(tokenizer_of(tmp_path))
    import_model(tmp_path / "hf", tmp_path / "with", with_proof=False)
    export_model(tmp_path / "with", tmp_path / "again", with_proof=False)
    texts, model = (json.loads((tmp_path / "again" / path.name).read_text()) for path in read)
    assert texts == {"max_seq_length": 16, "do_lower_case": True}
    assert {name: model[name] for name in ("prompts", "default_prompt_name")} == {
        "prompts": prompts,
        "default_prompt_name": "query",
    }
    assert "auto_map" not in model


def tokenizer_of(folder: Path) -> bytes:
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "house"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    special = [
        {"id": i, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for word, i in words.items()
        if word.startswith("[")
    ]
    return json.dumps({"version": "1.0", "added_tokens": special, "model": model}).encode()


@pytest.mark.parametrize("pooler", [True, False])
def test_a_proof_loads_a_pooler_only_if_the_files_have_one(pooler, tmp_path, caplog, monkeypatch):
    write_sentence_model(tmp_path / "hf", "bert", "new", pooling="cls", size=8)
    if not pooler:
        tensors = load_file(tmp_path / "hf" / "model.safetensors")
        kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("pooler.")}
        save_file(kept, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, "megalith")
    found = import_model(tmp_path / "hf", tmp_path / "run")
    assert isinstance(found.proof, LogitProof)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]
    assert ("2 tensors of" in caplog.text) == pooler
    transformers.BertModel.from_pretrained(tmp_path / "hf")
    assert ("newly initialized" in caplog.text) != pooler


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}),
        ("2_Dense/model.safetensors", {"linear.bias": 0.01}),
        ("2_Dense/model.safetensors", {"linear.weight": 0.01}),
        ("modules.json", {}),
    ],
)
def test_a_folder_that_embeds_otherwise_is_not_proven(name, fields, tmp_path):
    trained(tmp_path)
    export_model(tmp_path / "run", tmp_path / "hf")
    path = tmp_path / "hf" / name
    if name == "modules.json":
        path.write_text(json.dumps(json.loads(path.read_text())[:3]))  # not normalized
    elif name.endswith(".json"):
        change(tmp_path / "hf", name, **fields)
    else:
        tensors = load_file(path)
        for key, difference in fields.items():
            tensors[key].view(-1)[0] += difference
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="are not the same model: embeddings of 64 random tokens differ"):
        prove(tmp_path / "run", tmp_path / "hf")


def test_a_folder_of_theirs_is_trained_on_with_the_head_that_it_has(tmp_path, caplog):
    write_sentence_model(tmp_path / "hf", pooling="cls", size=8)
    bert = {"head": "embedding", "num_token_types": 2, "similarity_temperature": 0.2}
    recipe = tmp_path / "recipe.yaml"
    for given, warns in (({}, False), ({"embedding_pooling": "mean", "embedding_size": 16}, True)):
        caplog.clear()
        recipe.write_text(yaml.safe_dump({"model": {"bert": bert | given}}))
        read = TransformerConfig(**settings_from(str(tmp_path / "hf"), recipe)["model"]).bert
        assert (read.embedding_pooling, read.embedding_size, read.normalize_embeddings) == ("first", 8, True)
        assert read.similarity_temperature == 0.2  # no weight depends on it
        assert ("embedding_pooling is first, with which the head of" in caplog.text) == warns
        assert ("embedding_size is 8, with which the head of" in caplog.text) == warns
    recipe.write_text(yaml.safe_dump({"model": {"bert": {"head": "pretraining"}}}))
    assert "embedding_size" not in settings_from(str(tmp_path / "hf"), recipe)["model"]["bert"]


def test_an_encoder_that_does_not_say_how_it_embeds_takes_that_from_the_recipe(tmp_path, caplog):
    encoder("bert").save_pretrained(tmp_path / "hf")
    caplog.set_level(logging.INFO, "megalith")
    bert = {"head": "embedding", "embedding_pooling": "first", "embedding_size": 8, "normalize_embeddings": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": {"bert": bert}}))
    read = TransformerConfig(**settings_from(str(tmp_path / "hf"), tmp_path / "recipe.yaml")["model"]).bert
    assert (read.embedding_pooling, read.embedding_size, read.normalize_embeddings) == ("first", 8, False)
    assert "with which the head" not in caplog.text
    assert caplog.text.count("has no modules.json") == 1


def test_a_run_from_a_folder_of_theirs_embeds_as_it_does_in_any_layout(tmp_path):
    few = {"num_negatives": 1}  # so that a row fits the 24 positions of theirs
    source = settings_of(tmp_path, data=few, parallel={"tensor": 2}, optim={"lr": 1e-30})
    theirs = write_sentence_model(tmp_path / "hf", pooling="cls", size=8, vocab_size=source["model"]["vocab_size"])
    plain = {name: group for name, group in source.items() if name != "model"}
    tree = {**plain, "run": str(tmp_path / "tuned"), "model": {"bert": {"head": "embedding"}}}
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(tree | {"data": {**tree["data"], "seq_length": 24}}))
    ranks(2, train_on, 2, settings_from(str(tmp_path / "hf"), tmp_path / "tuned.yaml"))
    exported = export_model(tmp_path / "tuned", tmp_path / "out")
    assert isinstance(exported.proof, LogitProof)
    tokens = texts_of(tmp_path / "hf")
    with torch.no_grad():  # after a step at a learning rate of 1e-30
        hidden = theirs(tokens).last_hidden_state
        want = their_embeddings(hidden, torch.ones_like(tokens), tmp_path / "hf", "cls", 8, normalize=True)
        torch.testing.assert_close(load_model(tmp_path / "tuned").model(tokens), want, rtol=0, atol=1e-5)


def test_the_commands_say_what_to_do_next_and_it_runs(tmp_path):
    tree = trained(tmp_path)
    found = here("convert", "export", tmp_path / "run", "--out", tmp_path / "hf")
    assert found.code == 0, found
    assert "\nproof      embeddings of 64 random tokens differ by" in found.out
    load = f'transformers.BertModel.from_pretrained("{tmp_path / "hf"}")'
    model = f'sentence_transformers.SentenceTransformer("{tmp_path / "hf"}").encode(TEXTS)'
    assert found.out.splitlines()[-1] == f"next: {model}; its encoder alone: {load}"
    found = here("convert", "import", tmp_path / "hf", "--out", tmp_path / "back", "--no-proof")
    evaluation, training = found.out.splitlines()[-1].removeprefix("next: ").split(", or ")
    assert training == f"megalith train {tmp_path / 'back'} data.train=PAIRS"
    evaluated = here(*shlex.split(evaluation)[1:-1], tree["data"]["train"], "--samples", 2)
    assert evaluated.code == 0, evaluated
    assert "mrr" in evaluated.out
    short = ("train.steps=1", "train.global_batch_size=4", "data.num_negatives=1")
    again = here("train", tmp_path / "back", f"data.train={tree['data']['train']}", *short)
    assert again.code == 0, again


def test_a_folder_in_half_precision_is_proven_and_comes_back(tmp_path):
    tree = settings_of(tmp_path, "RoFormerModel", precision={"dtype": "bfloat16"})
    ranks(1, train, {**tree, "run": str(tmp_path / "run")})
    exported = export_model(tmp_path / "run", tmp_path / "hf")
    assert (exported.dtype, exported.proof.dtype) == ("bfloat16", "bfloat16")
    import_model(tmp_path / "hf", tmp_path / "back")
    again = export_model(tmp_path / "back", tmp_path / "again")
    assert isinstance(again.proof, LogitProof)
    for file in ("model.safetensors", "2_Dense/model.safetensors"):
        one, other = (load_file(tmp_path / name / file) for name in ("hf", "again"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert load_run(tmp_path / "back" / "config.yaml").precision.dtype == "bfloat16"
