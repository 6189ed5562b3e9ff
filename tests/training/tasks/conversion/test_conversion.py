"""megalith convert: transformers folders become runs and runs become such folders, bit for bit."""

import json
import logging
import re
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalith.checkpoint import find_checkpoint, save_checkpoint
from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.generation import generate
from megalith.models.hf import fitting
from megalith.models.sampling import Sampling
from megalith.training.inference import load_model
from megalith.training.tasks.conversion import export_model, import_model, prove
from tests.models.hf.modules import write_with_modules
from tests.program import here
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.tiny_run import GPT2, LLAMA, settings
from tests.training.outcomes import run_here
from tests.training.tasks.conversion.folders import SHAPES, write_folder

TOKENS = torch.randint(270, (2, 20), generator=torch.Generator().manual_seed(1))
EVERYTHING = [(shape, dtype, size) for shape in SHAPES for dtype in ("float32", "bfloat16") for size in ("1GB", "10KB")]


def tensors_in(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_bitwise(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].equal(tensor), name


@pytest.mark.parametrize(("shape", "dtype", "size"), sampled(EVERYTHING))
def test_a_folder_goes_in_and_out_to_the_bit_and_is_the_same_function_in_between(shape, dtype, size, tmp_path):
    source, run, out, again = (tmp_path / name for name in ("source", "run", "out", "again"))
    write_folder(source, shape, dtype, size)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    import_model(source, run, with_proof=False)
    ours = load_model(run, dtype=torch.float32).model
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    exported = export_model(run, out, with_proof=False)
    assert exported.dtype == dtype
    assert_bitwise(tensors_in(out), tensors_in(source))
    import_model(out, again, with_proof=False)
    shard = "checkpoints/step-00000000/shard-00000-of-00001.safetensors"
    assert (again / shard).read_bytes() == (run / shard).read_bytes()
    assert (again / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def loaded_in_silence(folder, caplog, **how):
    """Model and tokenizer as transformers loads them, without a warning or a log message."""
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [record.getMessage() for record in caplog.records] == []
    return model.eval(), tokenizer


@pytest.mark.parametrize(("shape", "most_bytes"), sampled([(s, b) for s in SHAPES for b in (5 * 10**9, 20_000)]))
def test_the_exported_folder_loads_without_a_warning_and_generates_token_for_token(
    shape, most_bytes, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("megalith.models.hf.write_folder._MOST_BYTES", most_bytes)
    write_folder(tmp_path / "source", shape)
    import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (most_bytes > 10**9)
    if len(files) > 1:
        assert all((tmp_path / "out" / file).stat().st_size < 2 * most_bytes for file in files)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    theirs, tokenizer = loaded_in_silence(tmp_path / "out", caplog)
    assert tokenizer.eos_token == "<|endoftext|>"
    prompt = tokenizer("some more words").input_ids
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    ours = load_model(tmp_path / "run").model
    [got] = generate(ours, [prompt], 8, sampling=Sampling(temperature=0.0))
    assert [*prompt, *got] == want[0].tolist()


def train_and_save(folder, num_ranks, **parallel):
    """Two steps, then a checkpoint in boxes, including moments."""
    tree = settings(folder, parallel=parallel, precision={"dtype": "float32"}, train={"steps": 2})
    run_here(tree, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [
        (2, {"tensor": 2}),
        pytest.param(4, {"tensor": 2, "shard": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_several_ranks_is_put_together(num_ranks, parallel, tmp_path):
    settings(tmp_path)  # writes the dataset before the ranks need it
    ranks(num_ranks, train_and_save, tmp_path, num_ranks, **parallel)
    step = find_checkpoint(tmp_path / "run" / "checkpoints")
    assert len(list(step.glob("*.safetensors"))) == num_ranks
    exported = export_model(step, tmp_path / "out", "float64")
    assert exported.proof.max_abs_difference < 1e-5
    weights = {name: tensor.double() for name, tensor in load_model(step).model.state_dict().items()}
    assert_bitwise(tensors_in(tmp_path / "out"), weights)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 16
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_modules_of_multi_token_prediction_are_left_out_and_the_logits_are_the_same(tmp_path):
    model, precision = {"mtp": {"num_modules": 2}}, {"dtype": "float32"}
    ranks(1, run_here, settings(tmp_path, model=model, precision=precision, train={"steps": 2}), 1)
    exported = export_model(tmp_path / "run", tmp_path / "out")
    assert exported.left_out == ("the multi-token prediction modules (2), which do not affect the logits",)
    assert exported.proof.max_abs_difference < 1e-5
    trained = load_model(tmp_path / "run").model
    weights = {name: tensor for name, tensor in trained.state_dict().items() if not re.search(r"layers\.[23]\.", name)}
    assert_bitwise(tensors_in(tmp_path / "out"), weights)
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM cannot represent this model:\n- mtp must be None; got MTPConfig"
    ):
        fitting(trained.config)


def test_modules_in_a_folder_are_trained_on_and_the_model_without_them_is_proved_and_exported(tmp_path):
    write_with_modules(tmp_path / "source", 1)
    found = import_model(tmp_path / "source", tmp_path / "run")
    assert found.proof.max_abs_difference < 1e-5
    ours = load_model(tmp_path / "run")
    assert ours.config.model.mtp.num_modules == 1
    assert found.num_parameters == sum(parameter.numel() for parameter in ours.model.parameters())
    exported = export_model(tmp_path / "run", tmp_path / "out")
    assert exported.left_out == ("the multi-token prediction modules (1), which do not affect the logits",)
    assert exported.proof.max_abs_difference < 1e-5
    without = {name: each for name, each in tensors_in(tmp_path / "source").items() if "layers.2." not in name}
    assert_bitwise(tensors_in(tmp_path / "out"), without)


def test_the_proof_is_stored_and_a_wrong_model_is_none(tmp_path):
    theirs = write_folder(tmp_path / "source", "gpt2", "bfloat16")
    found = import_model(tmp_path / "source", tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "proof.json").read_text())
    assert stored["max_abs_difference"] == found.proof.max_abs_difference < 1e-5
    assert (stored["num_tokens"], stored["dtype"]) == (48, "bfloat16")
    with torch.no_grad():
        theirs.transformer.h[1].attn.c_attn.weight[:, 32:64] *= 2
    theirs.save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="are not the same model: logits of 48 random tokens differ by"):
        prove(tmp_path / "run", tmp_path / "source")


@pytest.mark.parametrize("change", [{"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-6}])
def test_a_model_that_is_almost_the_same_is_not_the_same(change, tmp_path):
    write_folder(tmp_path / "source", "gpt2")
    import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    described = tmp_path / "source" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | change))
    with pytest.raises(CheckpointError, match="are not the same model: logits"):
        prove(tmp_path / "run", tmp_path / "source")


def test_models_of_other_shapes_and_what_transformers_refuses_are_one_message(tmp_path):
    write_folder(tmp_path / "source", "llama")
    write_folder(tmp_path / "other", "tied llama")
    import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    with pytest.raises(CheckpointError, match="are not the same model: the names or shapes of their tensors differ"):
        prove(tmp_path / "run", tmp_path / "other")
    described = tmp_path / "source" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"id2label": 3}))
    with pytest.raises(CheckpointError, match=r"transformers cannot run .*use --no-proof to skip the proof"):
        prove(tmp_path / "run", tmp_path / "source")


def test_an_imported_run_refuses_data_of_another_tokenizer_and_does_not_forget_what_it_has_learned(tmp_path):
    write_folder(tmp_path / "source", "llama")
    (tmp_path / "words.txt").write_text("some words to merge, some more words. " * 40)
    words = ("data", "prepare", tmp_path / "words.txt", "--out")
    assert here(*words, tmp_path / "other", "--vocab-size", 262).code == 0
    assert here(*words, tmp_path / "text", "--tokenizer", tmp_path / "source" / "tokenizer.json").code == 0
    run = tmp_path / "run"
    assert here("convert", "import", tmp_path / "source", "--out", run, "--no-proof").code == 0
    few = ("train.steps=2", "train.global_batch_size=2", "checkpoint.every=2")
    refused = here("train", run, f"data.train={tmp_path / 'other'}", *few)
    assert (refused.code, "a different tokenizer than the model of" in refused.err) == (2, True), refused
    assert here("train", run, f"data.train={tmp_path / 'text'}", *few).code == 0
    shard = next((run / "checkpoints" / "step-00000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    refused = here("train", run, f"data.train={tmp_path / 'text'}", "train.steps=3", *few[1:])
    assert (refused.code, "would start over from the weights of" in refused.err) == (2, True), refused


def test_a_run_that_was_imported_without_a_tokenizer_names_the_way_out(tmp_path):
    write_folder(tmp_path / "source", "llama")
    (tmp_path / "source" / "tokenizer.json").unlink()
    found = here("convert", "import", tmp_path / "source", "--out", tmp_path / "run", "--no-proof")
    assert found.code == 0, found
    assert "megalith generate" not in found.out
    refused = here("generate", tmp_path / "run", "--prompt", "some")
    assert (refused.code, "give --tokenizer PATH" in refused.err) == (2, True), refused


def test_an_import_whose_logits_differ_is_not_published(tmp_path, monkeypatch):
    write_folder(tmp_path / "source", "llama")
    monkeypatch.setattr("megalith.training.tasks.conversion.logit_proof._TOLERANCE", -1.0)
    with pytest.raises(CheckpointError, match="are not the same model"):
        import_model(tmp_path / "source", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("name", "value"), [("free_memory_bytes", lambda: 1000), ("optional.has", None)])
def test_where_no_proof_can_be_made_a_line_says_why_and_how(name, value, tmp_path, monkeypatch):
    write_folder(tmp_path / "source", "llama")
    if value is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        says = r"proof      skipped: .*pip install 'megalith\[hf\]'; then: megalith convert prove"
    else:
        monkeypatch.setattr(f"megalith.training.tasks.conversion.logit_proof.{name}", value)
        says = r"proof      skipped: it takes .*B of memory, but only 1\.00kB are free"
    found = here("convert", "import", tmp_path / "source", "--out", tmp_path / "run")
    assert found.code == 0, found
    assert re.search(says, found.out), found.out
    assert not (tmp_path / "run" / "proof.json").exists()


def test_the_imported_run_is_used_by_every_command(tmp_path):
    write_folder(tmp_path / "source", "llama", "bfloat16")
    data = tmp_path / "text"
    (tmp_path / "words.txt").write_text("some words to merge, some more words. " * 40)
    tokenizer = tmp_path / "source" / "tokenizer.json"
    assert here("data", "prepare", tmp_path / "words.txt", "--out", data, "--tokenizer", tokenizer).code == 0
    found = here("convert", "import", tmp_path / "source", "--out", tmp_path / "run", "--no-proof")
    assert (found.code, found.err) == (0, ""), found
    assert found.out.startswith("model      LlamaForCausalLM, 32.9k parameters in bfloat16, 65.7kB\n")
    run = (tmp_path / "run").rename(tmp_path / "moved")
    text = here("generate", run, "--prompt", "some", "--max-new-tokens", 4, "--temperature", 0)
    assert text.code == 0, text
    evaluated = here("eval", run, "--data", data)
    assert "at step 0" in evaluated.out, evaluated
    trained = here("train", run, f"data.train={data}", "train.steps=1", "train.global_batch_size=2")
    assert f"started at step 0 from the weights of {run}/checkpoints/step-00000000" in trained.out, trained
    gone_on = here("train", run, "train.steps=2")
    assert f"resumed from {run}/checkpoints/step-00000001" in gone_on.out, gone_on
    exported = here("convert", "export", run, "--out", tmp_path / "out", "--no-proof", "--dtype", "float32")
    assert exported.code == 0, exported
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_which_family_fits_follows_from_the_model_and_each_refusal_has_its_reason():
    assert fitting(TransformerConfig(**LLAMA)).model_type == "llama"
    assert fitting(TransformerConfig(**GPT2, max_position_embeddings=16)).model_type == "gpt2"
    with pytest.raises(
        ConfigError, match=r"(?s)LlamaForCausalLM cannot .*hidden_dropout.*others, .*GPT2LMHeadModel 8, "
    ):
        fitting(TransformerConfig(**LLAMA, hidden_dropout=0.1))


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    write_folder(tmp_path / "source", "llama")
    import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    shard = tmp_path / "run/checkpoints/step-00000000/shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="failed verification"):
        export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_tensors_than_its_settings_say_is_not_exported(tmp_path):
    write_folder(tmp_path / "source", "llama")
    import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    shutil.rmtree(tmp_path / "run/checkpoints")
    save_checkpoint(tmp_path / "run/checkpoints", 1, {"model.norm.weight": torch.ones(5)}, {}, keep_last=1)
    with pytest.raises(CheckpointError, match=r"(?s)missing: model\.embed_tokens.*model\.norm\.weight must be \[32\]"):
        export_model(tmp_path / "run", tmp_path / "out")
