"""Mixtures of experts in models/hf: defaults, boxes of experts, and refusals; test_parity compares numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.checkpoint.box import Box
from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE, open_folder
from megalith.models.hf.families import FAMILIES, fitting
from tests.models.hf import peers

PEERS = {name: peers.PEERS[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")}
of_peers = pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
SIZES = {"vocab_size": 8, "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@of_peers
def test_absent_fields_have_the_defaults_of_transformers(peer):
    required = {name: peers.LLAMA[name] for name in peer.family.sizes} | {"hidden_size": 64, "num_attention_heads": 16}
    bare = {"model_type": peer.family.model_type, **required}
    assert peer.family.config_from_hf(bare) == peer.family.config_from_hf(peer.config(**required).to_dict())


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise must be 0"),
        ("mixtral", {"num_experts_per_tok": 9}, r"top_k \(9\) must be at most model.moe.num_experts \(4\)"),
        ("mixtral", {"n_shared_experts": 1}, r"n_shared_experts \(1\) is a field that Megalith does not know"),
        ("qwen3_moe", {"num_experts": 6}, "num_experts and num_local_experts must be equal"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layer indices"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "must leave at least one layer with experts"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha must be 1\.702"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config .* does not know"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(name, fields, message):
    peer = PEERS[name]
    with pytest.raises(ConfigError, match=message):
        peer.family.config_from_hf(peer.build().config.to_dict() | fields)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (MIXTRAL, {}, "moe must be 'a mixture of experts'; got None"),
        (MIXTRAL, {"moe": {"num_experts": 4, "layers": [True, False]}}, r"moe.layers must be None"),
        (MIXTRAL, {"moe": {"num_experts": 4, "router": {"scaling_factor": 2.5}}}, r"moe.router.scaling_factor must be"),
        (MIXTRAL, {"moe": {"num_experts": 4, "capacity": {"factor": 1.0}}}, r"moe.capacity must be None"),
        (QWEN3_MOE, {"moe": {"num_experts": 4, "shared_ffn_hidden_size": 8}}, r"moe.shared_ffn_hidden_size must be"),
        (QWEN2_MOE, {"moe": {"num_experts": 4}}, r"moe.shared_ffn_hidden_size must be 'a positive integer'; got None"),
        (GPT_OSS, {"moe": {"num_experts": 4}, "activation": "quick_geglu"}, r"glu.offset must be 1.0; got 0.0"),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        family.require(TransformerConfig(**SIZES, **settings))


def test_what_evens_the_loads_in_training_is_no_matter_of_the_family():
    router = {"sequence_balance": 1e-2, "z_loss": 1e-3, "jitter": 0.01}
    MIXTRAL.require(TransformerConfig(**SIZES, moe={"num_experts": 4, "router": router}))


RANGES = {
    "model.layers.1.mlp.experts.gate_up_proj": ((1, 3), (0, 2), (3, 9), (5, 20)),
    "model.layers.0.mlp.experts.down_proj": ((3, 4), (2, 7), (0, 16)),
}


@pytest.mark.parametrize("name", RANGES)
@of_peers
def test_a_box_of_experts_is_read_from_wherever_it_lies_in_theirs(peer, name, tmp_path):
    theirs = peer.build()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    config = peer.family.config_from_hf(theirs.config.to_dict())
    whole = peer.family.from_hf(peers.as_in_files(theirs, theirs.state_dict()), config)
    box = Box(RANGES[name])
    into = torch.zeros(box.shape)
    open_folder(tmp_path).weights.fill({name: (box, into)})
    assert into.equal(whole[name][tuple(slice(*ends) for ends in box.ranges)])


def test_experts_of_several_dtypes_or_too_few_are_refused(tmp_path):
    peers.mixtral().save_pretrained(tmp_path)
    file, key = tmp_path / "model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors = load_file(file)
    save_file(tensors | {key: tensors[key].bfloat16()}, file)
    with pytest.raises(CheckpointError, match=r"the same dtype; model.layers.1.mlp.experts.gate_up_proj has BF16, F32"):
        open_folder(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    with pytest.raises(CheckpointError, match=f"missing: {key}"):
        open_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 10**9}))
    with pytest.raises(
        CheckpointError, match=r"with 2,000,000,000 experts in total must have at least one tensor for each"
    ):
        open_folder(tmp_path)


def test_a_factor_of_the_weights_is_why_no_family_fits_and_the_error_begins_with_it():
    with pytest.raises(ConfigError) as refused:
        fitting(TransformerConfig(preset="moe-tiny", vocab_size=2048))
    lines = str(refused.value).splitlines()
    assert lines[:3] == [
        "no transformers architecture can represent this model; the closest:",
        "MixtralForCausalLM cannot represent this model:",
        "- moe.router.scaling_factor must be 1.0; got 2.0",
    ]
    assert lines[3].endswith("with model.moe.router.scaling_factor=1, the default")
    assert sum(line.endswith("cannot represent this model:") for line in lines) == 3
    assert lines[-1].startswith("others, by how many settings do not fit: ")
    told = {line.partition(" ")[0] for line in lines} | set(lines[-1].partition(": ")[2].replace(",", "").split())
    assert {family.architecture for family in FAMILIES} <= told
    without = TransformerConfig(preset="moe-tiny", vocab_size=2048, moe={"router": {"scaling_factor": 1.0}})
    assert fitting(without) == MIXTRAL
