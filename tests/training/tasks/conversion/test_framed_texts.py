"""An exported encoder or T5 reads a text in transformers as it was trained to: the same tokens around it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.labelled import read_labelled
from megalith.data.labelled_dataset import LabelledTexts
from megalith.data.tokenizer import Tokenizer
from megalith.training.inference import evaluate_checkpoint
from megalith.training.pretrain import pretrain
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.generation import TextSource
from tests.program import here, start
from tests.rank_pool import ranks
from tests.tiny_masked import SEQ, masked_settings, write_sentences
from tests.tiny_run import LLAMA, settings
from tests.training.tasks.test_finetune_classification import labelled_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings

transformers = pytest.importorskip("transformers")

PROMPT = "the red <extra_id_0> sees a house <extra_id_1> river"


def train(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree), str, str)


def exported(tree: dict[str, Any], folder: Path) -> Path:
    ranks(1, train, {**tree, "run": str(folder / "run")})
    export_model(folder / "run", folder / "hf", with_proof=False)
    return folder / "hf"


def test_a_classifier_reads_and_predicts_in_transformers_what_it_does_here(tmp_path):
    write_sentences(tmp_path / "text", special_tokens=["bert"])
    # large weights, so that predictions differ without much training
    tree = labelled_settings(
        tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"}, model={"init_method_std": 0.3}
    )
    folder = exported(tree, tmp_path)
    labelled = tmp_path / "text" / "labelled"
    found = read_labelled(tmp_path / "text" / "x.csv")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    samples = LabelledTexts(labelled, Tokenizer.load(tmp_path / "run" / "tokenizer.json"), SEQ)
    assert theirs(list(found.texts)).input_ids == [sample.tokens.tolist() for sample in samples]
    predicted = [each["label"] for each in transformers.pipeline("text-classification", str(folder))(list(found.texts))]
    assert len(set(predicted)) > 1
    import_model(folder, tmp_path / "back", with_proof=False)
    for run in ("run", "back"):  # on the data that were prepared before the export
        [loss] = evaluate_checkpoint(tmp_path / run, str(labelled), None)
        for number, name in enumerate(samples.classes):
            given = [other for label, other in zip(found.labels, predicted, strict=True) if label == name]
            for place, other in enumerate(samples.classes):
                assert loss.means[f"confusion/{number}/{place}"] == given.count(other) / len(given)
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "run" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("num_types", [1, 2])
def test_of_a_pair_only_a_model_with_token_types_is_told_them(num_types, tmp_path):
    write_sentences(tmp_path / "text", special_tokens=["bert"])
    bert = {"num_token_types": num_types, "binary_head": num_types == 2}
    folder = exported(masked_settings(tmp_path / "text", train={"steps": 1}, model={"bert": bert}), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    found = theirs("the red house", "a tree", return_tensors="pt")
    assert theirs.decode(found["input_ids"][0]) == "[CLS]the red house[SEP]a tree[SEP]"
    first = len(theirs("the red house").input_ids)
    rest = len(found["input_ids"][0]) - first
    assert ("token_type_ids" in found) == (num_types == 2)
    assert num_types == 1 or found["token_type_ids"].tolist() == [[0] * first + [1] * rest]
    assert transformers.AutoModel.from_pretrained(folder)(**found).last_hidden_state.isfinite().all()


def test_a_t5_reads_the_end_of_a_prompt_in_transformers_too_and_never_twice(tmp_path):
    write_sentences(tmp_path / "text", special_tokens=["t5"])
    tree = t5_settings(tmp_path / "text", train={"steps": 4}, optim={"lr": 0.03}, precision={"dtype": "float32"})
    folder = exported(tree, tmp_path)
    import_model(folder, tmp_path / "back", with_proof=False)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = theirs(PROMPT, return_tensors="pt")
    for source in (tmp_path / "run", folder, tmp_path / "back"):
        assert TextSource.open(source).encode([PROMPT], special_tokens=True) == inputs["input_ids"].tolist()
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, 1:].tolist()
    text = theirs.decode(ids[: ids.index(theirs.eos_token_id)] if theirs.eos_token_id in ids else ids)
    asked = ["--special-tokens", "--temperature", 0, "--max-new-tokens", 8]
    assert here("generate", folder, "--prompt", PROMPT, *asked).out == f"{PROMPT}\n{text}\n"


def test_data_and_training_go_on_from_the_exported_folder(tmp_path):
    text = write_sentences(tmp_path / "text", special_tokens=["bert"])
    tree = masked_settings(tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    folder = exported(tree, tmp_path)
    given = ["data", "prepare", *sorted((tmp_path / "text").glob("*.txt")), "--out", tmp_path / "again"]
    assert here(*given, "--split-sentences", "--tokenizer", folder / "tokenizer.json").code == 0
    before, again = IndexedDataset(text), IndexedDataset(tmp_path / "again")
    assert sorted(before.tokens.tolist()) == sorted(again.tokens.tolist())
    for number, prefix in enumerate((text, tmp_path / "again")):
        found = here(
            "train", "--from", folder, f"data.train={prefix}", f"run={tmp_path / str(number)}", "train.steps=1",
            "train.global_batch_size=2", "data.masking.long_sentences=cut",
        )  # fmt: skip
        assert found.code == 0, found


def gpt_settings(folder: Path) -> dict[str, Any]:
    """A GPT whose tokenizer was trained for BERT."""
    write_sentences(folder, special_tokens=["bert"])
    model = {**LLAMA, "vocab_size": 397}
    return settings(folder, model=model, data={"train": str(folder / "text"), "seq_length": SEQ}, train={"steps": 1})


@pytest.mark.parametrize(
    ("make", "kinds", "theirs", "ours"),
    [
        (masked_settings, ["bert", "t5"], "TEXT", "[CLS]TEXT[SEP]"),
        (t5_settings, ["bert", "t5"], "TEXT", "TEXT<|endoftext|>"),
        (gpt_settings, ["bert"], "[CLS]TEXT[SEP]", "TEXT"),
        (masked_settings, ["bert"], None, None),
    ],
)
def test_an_export_whose_file_frames_texts_otherwise_tells_how_to_write_them(
    make: Any, kinds: Sequence[str], theirs: str | None, ours: str | None, tmp_path
):
    if make is not gpt_settings:
        write_sentences(tmp_path / "text", special_tokens=kinds)
    tree = make(tmp_path / "text") | {"run": str(tmp_path / "run")}
    ranks(1, train, {**tree, "train": {**tree["train"], "steps": 1}})
    # a process of its own, because pytest's handlers show what the command might not
    found = start("convert", "export", tmp_path / "run", "--out", tmp_path / "hf", "--no-proof").ended()
    assert found.code == 0, found
    told = [line for line in found.err.splitlines() if "add_special_tokens=False" in line]
    if ours is None:
        assert not told
        return
    assert told == [
        f"the exported tokenizer.json makes transformers read a text as {theirs!r}, but Megalith reads it as {ours!r}; "
        "to get the latter, write these tokens into the text and pass add_special_tokens=False"
    ]
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the red house"
    read = loaded(text).input_ids, loaded(ours.replace("TEXT", text), add_special_tokens=False).input_ids
    assert tuple(map(loaded.decode, read)) == (theirs.replace("TEXT", text), ours.replace("TEXT", text))


def test_a_classifier_imported_without_special_tokens_is_exported_without_advice(tmp_path, caplog):
    config = transformers.BertConfig(
        vocab_size=397, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "hf")
    made = json.loads((Path(write_sentences(tmp_path / "text")).parent / "text-tokenizer.json").read_text())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] != "[SEP]"]
    made["model"]["vocab"]["[SEPARATOR]"] = made["model"]["vocab"].pop("[SEP]")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(made))
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    with caplog.at_level("INFO"):
        export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert "add_special_tokens" not in caplog.text
