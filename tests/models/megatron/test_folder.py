"""Checkpoints written by Megatron-Core 0.16: our logits match its own, whatever its layout and ours.

The folders here were written by ``written_by_megatron.py``, with the logits that Megatron computed.
"""

import io
import json
import pickle
import re
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megalith.errors import CheckpointError, ConfigError, MegalithError
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import parameter_shapes
from megalith.models.megatron import is_megatron_folder, open_megatron_folder
from megalith.models.megatron.gpt import _ONLY, config_of
from megalith.models.megatron.torch_dist import read_tensors
from megalith.storage import open_store
from megalith.training.inference import load_model
from megalith.training.tasks.conversion import import_model
from megalith.training.tasks.origin import settings_from
from megalith.training.tasks.weights import load_weights

HERE = Path(__file__).parent
FOLDERS = {name: HERE / name for name in ("llama-tp2", "gpt-tp1", "windows-tp1", "nemotron-tp1")}
ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 8,
}

ROPE = {"position_embedding_type": "rope"}
# the values in Megatron's models of arguments for which ours accepts only one value
OF_OTHER_MODELS = {
    "num_experts": 8,
    "num_moe_experts": 8,
    "experimental_attention_variant": "gated_delta_net",
    "heterogeneous_block_specs": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "softmax_scale": 0.5,
    "multi_latent_attention": True,
    "mtp_num_layers": 1,
    "qk_l2_norm": True,
    "attention_output_gate": True,
    "softmax_type": "learnable",
    "apply_residual_connection_post_layernorm": True,
    "quick_geglu": True,
    "rotary_seq_len_interpolation_factor": 4,
    "no_rope_freq": 4,
    "is_hybrid_model": True,
    "heterogeneous_layers_config_path": "blocks.json",
    "scale_logits_with_mup": True,
    "use_mup": True,
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


def test_norms_of_queries_and_keys_and_windows_by_layer_are_settings():
    attention = open_megatron_folder(FOLDERS["windows-tp1"]).config.attention
    assert (attention.qk_norm, attention.window) == ("RMSNorm", 5)
    assert [attention.window_of(layer) for layer in range(2)] == [5, None]


def test_gains_that_are_stored_without_their_1_are_read_as_such(tmp_path):
    folder = Path(shutil.copytree(FOLDERS["windows-tp1"], tmp_path / "iter_0000012"))
    rewrite_arguments(folder, apply_layernorm_1p=True)
    found = open_megatron_folder(folder)
    assert found.config.residual.zero_centered_norm
    model = GPTModel(found.config).eval()
    state = {key: found.weights.read(key) for key in found.weights.tensors}
    gains = [key for key in state if "norm" in key]
    assert len(gains) == 2 * 4 + 1
    model.load_state_dict(state | {key: state[key] - 1 for key in gains})
    saved = torch.load(folder / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(model(saved["tokens"]), saved["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "skip", "windows"),
    [
        ((3, 0), None, [4, 4, 4, 4]),
        ([3, 0], 2, [4, None, 4, None]),
        ((3, 0), 3, [4, 4, None, 4]),
        ((3, 0), 9, [4, 4, 4, 4]),
        ((3, 0), 1, [None] * 4),
        ((0, 0), [1, 0, 0, 1], [1, None, None, 1]),
        ((-1, 0), 2, [None] * 4),
        (None, 2, [None] * 4),
    ],
)
def test_which_layers_have_a_window_and_how_long_it_is_follow_from_megatrons_arguments(size, skip, windows):
    given = ARGUMENTS | {"num_layers": 4, "window_size": size, "window_attn_skip_freq": skip}
    attention = config_of(given, 48).attention
    assert [attention.window_of(layer) for layer in range(4)] == windows


def test_norms_of_queries_and_keys_are_of_the_kind_of_all_others():
    for kind in ("RMSNorm", "LayerNorm"):
        assert config_of(ARGUMENTS | {"qk_layernorm": True, "normalization": kind}, 48).attention.qk_norm == kind
    assert config_of(ARGUMENTS, 48).attention.qk_norm is None


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
    with pytest.raises(CheckpointError, match="torch_dist format; it is in 'zarr'"):
        open_megatron_folder(folder)


def test_a_checkpoint_without_arguments_says_what_it_lacks(folder):
    torch.save({"iteration": 3}, folder / "common.pt")
    with pytest.raises(ConfigError, match="must contain Megatron's args"):
        open_megatron_folder(folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window_size": (3, 1)}, r"window_size must be .*\(127, 0\).*; it is tuple"),
        ({"window_size": (-2, 0)}, "window_size must be"),
        ({"window_size": 3}, "window_size must be .*; it is 3"),
        ({"window_size": (True, 0)}, "window_size must be"),
        ({"window_size": (10**12, 0)}, "attention.window: Input should be less than"),
        (
            {"window_size": (3, 0), "window_attn_skip_freq": 0},
            "window_attn_skip_freq must be an integer n, .*; it is 0",
        ),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1]}, "for each of the 2 layers; it is list"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1, 2]}, "window_attn_skip_freq must be"),
        ({"window_size": (3, 0), "num_layers": 10**12}, "num_layers"),
        ({"position_embedding_type": "mrope"}, "'rope' or 'learned_absolute'; it is 'mrope'"),
        (ROPE | {"rotary_percent": 0}, "rope.percent: Input should be greater than 0"),
        (ROPE | {"rotary_percent": "all"}, "rope.percent: Input should be a valid number"),
        (ROPE | {"use_rope_scaling": True, "rope_scaling_factor": 0.5}, "rope.scaling.factor: Input should be"),
        ({"num_layers": "2"}, "must have integers for num_layers"),
        ({"normalization": "Other"}, "normalization"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
    ],
)
def test_arguments_that_describe_no_model_of_ours_are_named(given, said):
    config_of(ARGUMENTS, 48)
    with pytest.raises(ConfigError, match=said):
        config_of(ARGUMENTS | given, 48)


@pytest.mark.parametrize("name", sorted(OF_OTHER_MODELS.keys() | _ONLY.keys()))
def test_an_argument_of_which_one_value_is_ours_is_refused_by_name_with_another(name):
    one, other = _ONLY[name], OF_OTHER_MODELS[name]
    for given in one:  # also as Megatron leaves it by default
        assert config_of(ARGUMENTS | ROPE | {name: given}, 48) == config_of(ARGUMENTS | ROPE, 48)
    with pytest.raises(ConfigError, match=rf"\n- {name} must be {re.escape(repr(one[0]))}; it is {other!r}$"):
        config_of(ARGUMENTS | ROPE | {name: other}, 48)


def test_gelu_is_by_tanh_where_megatrons_fusion_computes_it_so():
    assert config_of(ARGUMENTS, 48).activation == "gelu_tanh"
    assert config_of(ARGUMENTS | {"bias_gelu_fusion": False}, 48).activation == "gelu"


def test_num_query_groups_counts_only_with_group_query_attention():
    assert config_of(ARGUMENTS | {"num_query_groups": 1}, 48).num_query_groups == 4
    assert config_of(ARGUMENTS | {"num_query_groups": 1, "group_query_attention": True}, 48).num_query_groups == 1


def test_arguments_of_another_size_are_refused_before_a_tensor_is_read(folder):
    rewrite_arguments(folder, ffn_hidden_size=32)
    with pytest.raises(CheckpointError, match="which does not match"):
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
    with pytest.raises(CheckpointError, match="not in its own folder"):
        open_megatron_folder(folder)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offset": 10**15}, "does not contain bytes"),
        ({"offset": -1}, "are not a valid range"),
        ({"length": 10**15}, "does not contain bytes"),
        ({"length": 3}, "not valid torch.save output"),
        ({"transform_descriptors": ["zstd"]}, "compressed or encrypted"),
    ],
)
def test_places_that_a_file_does_not_have_are_refused(changed, said, folder):
    rewrite_places(folder, **changed)
    with pytest.raises(CheckpointError, match=said):
        open_megatron_folder(folder)


def test_rows_that_two_parts_of_a_tensor_have_are_refused(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first, second = metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks
    num_rows = first.sizes[0]
    assert (tuple(second.offsets), second.sizes) == ((num_rows, 0), first.sizes)
    second.offsets = first.offsets  # as many elements as the tensor has, half of them twice
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = r"word_embeddings\.weight in .* every element of model\.embed_tokens\.weight once; it has \[0, 0\] 2 times"
    with pytest.raises(CheckpointError, match=said):
        open_megatron_folder(folder)


def test_elements_that_reach_a_byte_beyond_their_part_of_a_file_are_refused(folder):
    tensor = read_tensors(open_store(folder))["embedding.word_embeddings.weight"]
    chunk = tensor.chunks[0]
    content = bytearray((folder / chunk.file).read_bytes())
    assert chunk.stop < len(content)  # the bytes of the next part would be read in its place
    with zipfile.ZipFile(io.BytesIO(content[chunk.start : chunk.stop])) as archive:
        [elements] = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name_length, extra_length = chunk.start + elements.header_offset + 26, chunk.start + elements.header_offset + 28
    end_of_header = extra_length + 2 + int.from_bytes(content[name_length:extra_length], "little")
    # Python's zipfile reads it from the central directory at the end, not from here
    content[extra_length : extra_length + 2] = (chunk.stop + 1 - elements.file_size - end_of_header).to_bytes(
        2, "little"
    )
    (folder / chunk.file).write_bytes(content)
    said = rf"{chunk.file}, bytes {chunk.start} to {chunk.stop} is not .*: its elements extend past its end"
    with pytest.raises(CheckpointError, match=said):
        open_megatron_folder(folder)


@pytest.mark.parametrize("arguments", [{"swiglu": False}, {"num_query_groups": 1}, {"num_query_groups": 4}])
def test_rows_that_no_parameter_takes_are_refused(arguments, folder):
    rewrite_arguments(folder, **arguments)
    with pytest.raises(
        CheckpointError, match=r"rows in total according to the training arguments|which does not match"
    ):
        open_megatron_folder(folder)


def test_a_file_that_is_compressed_is_refused_before_it_grows(folder):
    with zipfile.ZipFile(folder / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6)
    with pytest.raises(CheckpointError, match="it is compressed"):
        open_megatron_folder(folder)


@pytest.mark.parametrize(
    "base", ["abc", 10**6000, float("nan"), None, [1]], ids=["text", "large", "NaN", "none", "list"]
)
def test_a_rotary_base_that_is_no_number_is_one_error(base):
    with pytest.raises(ConfigError, match="rotary_base must be a number above 1"):
        config_of(ARGUMENTS | {"position_embedding_type": "rope", "rotary_base": base}, 48)


def test_an_argument_of_any_size_is_told_in_a_few_words():
    nested = []
    for _ in range(40):
        nested = [nested, nested]
    for value in (nested, 10**6000, "x" * 10**6):
        with pytest.raises(ConfigError) as refusal:
            config_of(ARGUMENTS | {"num_experts": value}, 48)
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
def test_a_damaged_file_is_an_error_and_never_a_traceback(name, folder):
    content = (folder / name).read_bytes()
    generator = torch.Generator().manual_seed(0)
    read_all(folder)
    for _ in range(40):
        place = int(torch.randint(len(content), (), generator=generator))
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        (folder / name).write_bytes(damaged)
        with suppress(MegalithError):  # it may be an element of a tensor, which may have any value
            read_all(folder)
        (folder / name).write_bytes(content[:place])
        with pytest.raises(CheckpointError):
            read_all(folder)


def read_all(folder):
    found = open_megatron_folder(folder)
    for key in found.weights.tensors:
        found.weights.read(key)


def rewrite_places(folder, **changed):
    """Rewrites the metadata so that every tensor is stored elsewhere."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        vars(info).update(changed)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rewrite_arguments(folder, **changed):
    common = torch.load(folder / "common.pt", weights_only=False)
    vars(common["args"]).update(changed)
    torch.save(common, folder / "common.pt")
