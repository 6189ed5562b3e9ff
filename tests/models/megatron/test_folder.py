"""Checkpoints that Megatron-Core 0.16 wrote: its logits are ours, whatever its layout and ours.

The two folders here were written by ``written_by_megatron.py``, with the logits that Megatron computed.
"""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megalith.errors import CheckpointError, ConfigError, MegalithError
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import parameter_shapes
from megalith.models.megatron import is_megatron_folder, open_megatron_folder
from megalith.models.megatron.gpt import config_of
from megalith.storage import open_store
from megalith.training.inference import load_model
from megalith.training.tasks.conversion import import_model
from megalith.training.tasks.origin import settings_from
from megalith.training.tasks.weights import load_weights

HERE = Path(__file__).parent
FOLDERS = {"llama-tp2": HERE / "llama-tp2", "gpt-tp1": HERE / "gpt-tp1"}
ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 8,
}


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDERS["llama-tp2"], tmp_path / "iter_0000012"))


@pytest.mark.parametrize("name", FOLDERS)
def test_the_logits_are_those_that_megatron_computed(name):
    found = open_megatron_folder(FOLDERS[name])
    model = GPTModel(found.config).eval()
    model.load_state_dict({key: found.weights.read(key) for key in found.weights.tensors})
    saved = torch.load(FOLDERS[name] / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(model(saved["tokens"]), saved["logits"], rtol=0, atol=1e-5)


def test_it_becomes_a_run_that_generates_and_says_why_there_is_no_proof(tmp_path):
    found = import_model(FOLDERS["llama-tp2"], tmp_path / "run")
    assert isinstance(found.proof, str)
    assert "megalith eval" in found.proof
    saved = torch.load(FOLDERS["llama-tp2"] / "logits.pt")
    with torch.no_grad():
        logits = load_model(tmp_path / "run", dtype=torch.float32).model(saved["tokens"])
    torch.testing.assert_close(logits, saved["logits"], rtol=0, atol=1e-5)


def test_training_starts_from_it():
    settings = settings_from(str(FOLDERS["gpt-tp1"]), None)
    assert settings["load"] == str(FOLDERS["gpt-tp1"])
    assert settings["data"] == {"seq_length": 32}
    weights = {name: torch.empty(shape) for name, shape in parameter_shapes(settings["model"]).items()}
    load_weights(settings["load"], weights)
    stored = open_megatron_folder(settings["load"]).weights
    assert all(tensor.equal(stored.read(name)) for name, tensor in weights.items())


def test_the_newest_iteration_of_a_folder_is_read(folder):
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert is_megatron_folder(open_store(folder.parent))
    assert open_megatron_folder(folder.parent).store.split()[1] == "iter_0000012"
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("../12")
    with pytest.raises(CheckpointError, match="number of an iteration"):
        open_megatron_folder(folder.parent)


def test_a_folder_of_another_kind_is_not_taken_for_one(folder, tmp_path):
    assert is_megatron_folder(open_store(folder))
    (folder / "common.pt").unlink()
    assert not is_megatron_folder(open_store(folder))
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        open_megatron_folder(folder)


def test_another_format_of_megatrons_is_named(folder):
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="torch_dist; it is 'zarr'"):
        open_megatron_folder(folder)


def test_a_checkpoint_without_arguments_says_what_it_lacks(folder):
    torch.save({"iteration": 3}, folder / "common.pt")
    with pytest.raises(ConfigError, match="must hold Megatron's args"):
        open_megatron_folder(folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_experts": 8}, "num_experts must be None; it is 8"),
        ({"squared_relu": True}, "squared_relu must be False; it is True"),
        ({"position_embedding_type": "mrope"}, "'rope' or 'learned_absolute'; it is 'mrope'"),
        ({"add_qkv_bias": True}, "add_qkv_bias"),
        ({"num_layers": "2"}, "whole numbers for num_layers"),
        ({"normalization": "Other"}, "normalization"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
    ],
)
def test_arguments_that_describe_no_model_of_ours_are_named(given, said):
    config_of(ARGUMENTS, 48)
    with pytest.raises(ConfigError, match=said):
        config_of(ARGUMENTS | given, 48)


def test_gelu_is_by_tanh_where_megatrons_fusion_computes_it_so():
    assert config_of(ARGUMENTS, 48).activation == "gelu_tanh"
    assert config_of(ARGUMENTS | {"bias_gelu_fusion": False}, 48).activation == "gelu"


def test_num_query_groups_counts_only_with_group_query_attention():
    assert config_of(ARGUMENTS | {"num_query_groups": 1}, 48).num_query_groups == 4
    assert config_of(ARGUMENTS | {"num_query_groups": 1, "group_query_attention": True}, 48).num_query_groups == 1


def test_arguments_of_another_size_are_refused_before_a_tensor_is_read(folder):
    rewrite_arguments(folder, ffn_hidden_size=32)
    with pytest.raises(CheckpointError, match="does not fit"):
        open_megatron_folder(folder)
    rewrite_arguments(folder, ffn_hidden_size=24, num_layers=3)
    with pytest.raises(CheckpointError, match="must have 3 layers"):
        open_megatron_folder(folder)


def test_a_tensor_that_the_model_does_not_have_is_refused(folder):
    rewrite_arguments(folder, untie_embeddings_and_output_weights=False)
    with pytest.raises(CheckpointError, match=r"does not have: output_layer\.weight"):
        open_megatron_folder(folder)


@pytest.mark.parametrize("file", ["../outside.distcp", "/etc/passwd", "..", ""])
def test_files_outside_of_the_folder_are_never_read(file, folder):
    shutil.copy(folder / "__0_0.distcp", folder.parent / "outside.distcp")
    rewrite_places(folder, relative_path=file)
    with pytest.raises(CheckpointError, match="not of its own folder"):
        open_megatron_folder(folder)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offset": 10**15}, "no bytes"),
        ({"offset": -1}, "no range"),
        ({"length": 10**15}, "no bytes"),
        ({"length": 3}, "not a tensor that torch.save wrote"),
        ({"transform_descriptors": ["zstd"]}, "compressed or encrypted"),
    ],
)
def test_places_that_a_file_does_not_have_are_refused(changed, said, folder):
    rewrite_places(folder, **changed)
    with pytest.raises(CheckpointError, match=said):
        open_megatron_folder(folder)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
def test_a_damaged_file_is_an_error_and_never_a_traceback(name, folder):
    content = (folder / name).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        place = int(torch.randint(len(content), (), generator=generator))
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        (folder / name).write_bytes(damaged)
        read_all(folder)
        (folder / name).write_bytes(content[:place])
        read_all(folder)


def read_all(folder):
    """Reads every tensor, or raises nothing but an error of ours."""
    try:
        found = open_megatron_folder(folder)
        for key in found.weights.tensors:
            found.weights.read(key)
    except MegalithError:
        pass


def rewrite_places(folder, **changed):
    """Says of every tensor that it is elsewhere."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        vars(info).update(changed)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rewrite_arguments(folder, **changed):
    common = torch.load(folder / "common.pt", weights_only=False)
    vars(common["args"]).update(changed)
    torch.save(common, folder / "common.pt")
