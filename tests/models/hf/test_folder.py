"""models/hf/folder: folders written by transformers, in one file and in shards; and folders that must be refused."""

import json
import os
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from megalith.checkpoint.box import Box
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import FAMILIES, GPT2, LLAMA, detect, open_folder, read_folder
from megalith.storage import LocalStore
from tests.models.hf import peers

MODELS = {"llama": (peers.llama, LLAMA), "tied llama": (lambda: peers.llama(tie_word_embeddings=True), LLAMA)}
MODELS["gpt2"] = (peers.gpt2, GPT2)


@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize(("build", "architecture"), MODELS.values(), ids=MODELS)
def test_a_folder_that_transformers_saved_is_read(build, architecture, max_shard_size, tmp_path):
    theirs = build()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "10KB")
    config, state = read_folder(tmp_path)
    assert config == architecture.config_from_hf(theirs.config.to_dict())
    peers.assert_bitwise(state, architecture.from_hf(theirs.state_dict(), config))


def test_an_architecture_that_we_do_not_have_is_refused():
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    with pytest.raises(ConfigError, match=rf"model_type of {known}; got 'mamba'"):
        detect({"model_type": "mamba"})
    with pytest.raises(ConfigError, match=rf"model_type of {known}; got \['llama'\]"):
        detect({"model_type": ["llama"]})


def test_of_hundreds_of_tensors_that_do_not_fit_the_first_are_told_and_the_rest_counted(tmp_path):
    peers.llama().save_pretrained(tmp_path)  # 2 layers of 9 tensors, plus 3
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 21}))
    with pytest.raises(CheckpointError, match=r"and 121 more$") as refusal:
        read_folder(tmp_path)
    assert len(str(refusal.value).splitlines()) == 52


def test_more_layers_than_tensors_are_refused_before_they_are_named(tmp_path):
    peers.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10_000}))
    with pytest.raises(CheckpointError, match="with 10,000 layers must have at least one tensor for each"):
        read_folder(tmp_path)


@pytest.fixture
def folder(tmp_path):
    peers.llama().save_pretrained(tmp_path, max_shard_size="10KB")
    return tmp_path


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def remove_config(folder):
    (folder / "config.json").unlink()


def break_config(folder):
    (folder / "config.json").write_text("{")


def list_as_config(folder):
    (folder / "config.json").write_text("[]")


def nest_config(folder):
    (folder / "config.json").write_text("[" * 100_000)


def pipe_as_config(folder):
    remove_config(folder)
    os.mkfifo(folder / "config.json")


def pipe_as_shard(folder):
    shard = shards(folder)[0]
    shard.unlink()
    os.mkfifo(shard)


def truncate_shard(folder):
    shard = shards(folder)[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def remove_shard(folder):
    shards(folder)[0].unlink()


def smuggle_a_tensor(folder):
    save_file({"model.extra": torch.ones(1)}, shards(folder)[0])


def point_outside(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))


def lose_the_map(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def only_a_pickle(folder):
    for file in (*shards(folder), folder / "model.safetensors.index.json"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def nothing(folder):
    only_a_pickle(folder)
    (folder / "pytorch_model.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_config, r"cannot read .*config\.json: No such file"),
        (break_config, r"config\.json is not JSON"),
        (list_as_config, r"config\.json must contain a JSON object; it contains a list"),
        (nest_config, r"config\.json is not JSON"),
        (pipe_as_config, r"cannot read .*config\.json: it is a FIFO, not a regular file"),
        (pipe_as_shard, r"cannot read .*\.safetensors: it is a FIFO, not a regular file"),
        (truncate_shard, r"safetensors cannot be read as safetensors"),
        (remove_shard, r"cannot read .*\.safetensors: No such file"),
        (smuggle_a_tensor, r"must list the same tensors; only one of them has: model\."),
        (point_outside, r"must only name files in its own folder; it names '\.\./elsewhere\.safetensors'"),
        (lose_the_map, r"must have a weight_map"),
        (only_a_pickle, r"it contains pytorch_model\.bin, but pickle files are never read"),
        (nothing, r"must contain model\.safetensors or model\.safetensors\.index\.json; it contains neither"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read_folder(folder)


class Counting(LocalStore):
    """A folder that counts the bytes of safetensors read after their headers."""

    read_bytes: ClassVar[list[int]] = []

    def read_into(self, name, start, buffer):
        self.read_bytes.append(len(buffer))
        super().read_into(name, start, buffer)


PARTS = {
    "rows of a matrix": ("model.layers.1.mlp.up_proj.weight", ((3, 9), (0, 32))),
    "columns of a matrix": ("model.layers.1.mlp.down_proj.weight", ((0, 32), (7, 20))),
    "a block of the keys": ("model.layers.0.self_attn.k_proj.weight", ((2, 10), (8, 32))),
    "some of the bias of the values": ("model.layers.1.self_attn.v_proj.bias", ((5, 12),)),
    "rows of the embedding": ("model.embed_tokens.weight", ((60, 61), (0, 32))),
}


@pytest.mark.parametrize(("name", "ranges"), PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_box_of_ours_is_read_from_wherever_it_lies_in_theirs(family, name, ranges, tmp_path):
    biases = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
    theirs = peers.llama(**biases) if family is LLAMA else peers.gpt2()
    theirs.save_pretrained(tmp_path)
    whole = family.from_hf(theirs.state_dict(), family.config_from_hf(theirs.config.to_dict()))
    weights = open_folder(tmp_path).weights
    box = Box(ranges)
    into = torch.zeros(box.shape)
    weights.fill({name: (box, into)})
    assert into.equal(whole[name][tuple(slice(*ends) for ends in ranges)])


def test_opening_reads_headers_alone_and_a_box_of_rows_its_own_bytes(tmp_path):
    peers.llama().save_pretrained(tmp_path)
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    Counting.read_bytes.clear()
    weights = open_folder(Counting(tmp_path)).weights
    described = [(tmp_path / file).stat().st_size for file in ("config.json", "generation_config.json")]
    assert sum(Counting.read_bytes) == header + sum(described)
    into = torch.zeros(6, 32)
    weights.fill({"model.layers.1.mlp.up_proj.weight": (Box(((3, 9), (0, 32))), into)})
    assert Counting.read_bytes[-1] == into.nbytes
