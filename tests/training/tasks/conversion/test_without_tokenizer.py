"""A folder without a tokenizer.json: the ids that end its texts still survive import, run and export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.data.tokenizer import Tokenizer
from megalith.storage import open_store
from megalith.training.kept import kept_marks, kept_tokenizer
from megalith.training.run_folder import find_tokenizer
from megalith.training.tasks.conversion import export_model, import_model
from tests.models.hf.test_t5 import CASES
from tests.program import here
from tests.tiny_run import write_dataset
from tests.training.tasks.conversion.folders import VOCAB, write_folder

transformers = pytest.importorskip("transformers")

BEGIN, END, PAD = 253, 255, 254
ALL = {"eos_token_id": 0, "bos_token_id": BEGIN, "pad_token_id": PAD}
FILES = ("tokenizer.json", "tokenizer_config.json")


def without_tokenizer(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, shape="llama") -> Path:
    """A model whose only information about tokens is in ``config`` and ``generation``."""
    write_folder(folder, shape)
    (folder / "tokenizer.json").rename(folder.parent / "tokenizer.json")
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    fields = {name: value for name, value in json.loads(path.read_text()).items() if "token_id" not in name}
    path.write_text(json.dumps(fields | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tokens_of(folder: Path) -> dict[str, Any]:
    """What transformers' config and generation config say about tokens."""
    config = transformers.AutoConfig.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    return {name: (getattr(config, name), getattr(generation, name)) for name in names}


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({"eos_token_id": 7}, None, {"eos_token_id": 7}),
        ({"eos_token_id": [7, END]}, None, {"eos_token_id": [7, END]}),
        (ALL, None, ALL),
        ({"eos_token_id": 7}, {"eos_token_id": [7, END]}, {"eos_token_id": [7, END]}),
        ({}, {"eos_token_id": 7, "pad_token_id": 0}, {"eos_token_id": 7, "pad_token_id": 0}),
        ({"eos_token_id": 7, "pad_token_id": -1}, {"eos_token_id": VOCAB}, {"eos_token_id": 7}),
        ({"eos_token_id": VOCAB}, {"eos_token_id": ["x", END]}, {"eos_token_id": END}),
    ],
)  # fmt: skip
def test_the_ids_of_a_folder_come_out_of_the_run_that_is_made_of_it(config, generation, want, tmp_path):
    source = without_tokenizer(tmp_path / "hf", config, generation)
    import_model(source, tmp_path / "run", with_proof=False)
    assert kept_tokenizer(open_store(tmp_path / "run")) is None
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert tokens_of(tmp_path / "out") == {
        name: (want.get(name), want.get(name)) for name in ("eos_token_id", "bos_token_id", "pad_token_id")
    }
    assert not any((tmp_path / "out" / name).exists() for name in FILES)
    import_model(tmp_path / "out", tmp_path / "again", with_proof=False)
    assert kept_marks(open_store(tmp_path / "again")) == kept_marks(open_store(tmp_path / "run"))


def test_settings_of_sampling_travel_and_transformers_stops_where_the_source_would(tmp_path):
    sampling = {"temperature": 0.6, "do_sample": True, "eos_token_id": [0, 7]}
    source = without_tokenizer(tmp_path / "hf", {"eos_token_id": 0}, sampling)
    import_model(source, tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    generation = model.generation_config.to_dict()
    assert {name: generation[name] for name in sampling} == sampling
    assert model.config.eos_token_id == [0, 7]


def test_a_tokenizer_that_is_given_to_the_run_ends_texts_as_the_folder_says(tmp_path):
    source = without_tokenizer(tmp_path / "hf", {"eos_token_id": 7}, {"eos_token_id": [7, END]})
    import_model(source, tmp_path / "run", with_proof=False)
    found = find_tokenizer(open_store(tmp_path / "run"), None, tmp_path / "tokenizer.json")
    assert (found.eod, found.ends, found.begin) == (7, (7, END), ())
    other = find_tokenizer(open_store(tmp_path / "run"), None, tmp_path / "tokenizer.json", "<|endoftext|>")
    assert (other.eod, other.ends) == (0, (0, 7, END))


@pytest.mark.parametrize("through", ["folder", "run"])
def test_a_run_that_trains_on_data_without_a_tokenizer_keeps_them_too(through, tmp_path):
    source = without_tokenizer(tmp_path / "hf", {"eos_token_id": 7}, {"eos_token_id": [7, END]})
    write_dataset(tmp_path / "text")
    if through == "run":
        import_model(source, tmp_path / "imported", with_proof=False)
        source = tmp_path / "imported"
    few = (f"run={tmp_path / 'run'}", "train.steps=1", "train.global_batch_size=1", "data.seq_length=24")
    found = here("train", "--from", source, f"data.train={tmp_path / 'text'}", *few)
    assert found.code == 0, found
    assert here("train", tmp_path / "run", "train.steps=2").code == 0
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert tokens_of(tmp_path / "out")["eos_token_id"] == ([7, END], [7, END])


def test_an_imported_run_that_trains_on_data_without_a_tokenizer_keeps_its_own(tmp_path, caplog):
    write_folder(tmp_path / "hf", "llama")
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    write_dataset(tmp_path / "text")
    few = ("train.steps=1", "train.global_batch_size=1")
    found = here("train", tmp_path / "run", f"data.train={tmp_path / 'text'}", *few)
    assert found.code == 0, found
    assert "does not record which tokenizer made it; it must be that of" in caplog.text
    kept = kept_tokenizer(open_store(tmp_path / "run"))
    assert kept.sha256 == Tokenizer.load(tmp_path / "hf" / "tokenizer.json").sha256


def test_an_upcycled_run_keeps_them(tmp_path):
    source = without_tokenizer(tmp_path / "hf", {"eos_token_id": 7}, None)
    import_model(source, tmp_path / "run", with_proof=False)
    for number, origin in enumerate((source, tmp_path / "run")):
        out = tmp_path / str(number)
        found = here("convert", "upcycle", origin, "--out", out, "model.moe.num_experts=4", "model.moe.top_k=2")
        assert found.code == 0, found
        assert kept_marks(open_store(out)).ends == (7,)


def test_an_export_that_knows_no_end_says_so_in_a_line(tmp_path, caplog):
    caplog.set_level("INFO", logger="megalith")
    said = "no known end-of-text token, so the exported config.json has none either"
    for name, config in (("with", {"eos_token_id": 7}), ("none", {})):
        caplog.clear()
        source = without_tokenizer(tmp_path / name / "hf", config, None)
        import_model(source, tmp_path / name / "run", with_proof=False)
        export_model(tmp_path / name / "run", tmp_path / name / "out", with_proof=False)
        assert (said in caplog.text) == (name == "none")


def test_a_t5_answers_as_before_from_the_token_that_its_decoder_begins_with(tmp_path):
    theirs = CASES["t5"].build()
    theirs.generation_config.update(decoder_start_token_id=3, eos_token_id=[1, 7], pad_token_id=2)
    theirs.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert (again.config.decoder_start_token_id, again.config.eos_token_id, again.config.pad_token_id) == (3, [1, 7], 2)
    prompt = torch.arange(8, 20).view(1, 12)
    how = {"max_new_tokens": 9, "do_sample": False, "use_cache": False}
    assert again.generate(prompt, **how).tolist() == theirs.generate(prompt, **how).tolist()


def test_an_encoder_has_them_in_its_config_alone(tmp_path):
    source = without_tokenizer(tmp_path / "hf", {"eos_token_id": 2, "pad_token_id": 5}, None, "roformer")
    import_model(source, tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["eos_token_id"], exported["pad_token_id"]) == (2, 5)
    assert not (tmp_path / "out" / "generation_config.json").exists()
