"""models/hf/qwen: transformers' own Qwen2 and Qwen3 are the judges of names, shapes, defaults and numbers."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.generation import generate
from megalith.models.hf import LLAMA, QWEN2, QWEN3, Family, detect, fitting
from megalith.models.sampling import Sampling
from tests.models.hf import peers


class Peer(NamedTuple):
    family: Family
    build: Callable[..., PreTrainedModel]
    config: type
    model: type


QWEN2_PEER = Peer(QWEN2, peers.qwen2, Qwen2Config, Qwen2ForCausalLM)
QWEN3_PEER = Peer(QWEN3, peers.qwen3, Qwen3Config, Qwen3ForCausalLM)
PEERS = {"qwen2": QWEN2_PEER, "qwen3": QWEN3_PEER}
CASES = {
    "qwen2, grouped-query": (QWEN2_PEER, {}),
    "qwen2, tied, one key and value for all heads": (
        QWEN2_PEER,
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen2, odd sizes": (QWEN2_PEER, {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "qwen3, heads wider than hidden / heads": (QWEN3_PEER, {}),
    "qwen3, tied, biases": (QWEN3_PEER, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, odd sizes": (
        QWEN3_PEER,
        {"hidden_size": 35, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6},
    ),
}
of_cases = pytest.mark.parametrize(("peer", "fields"), CASES.values(), ids=CASES)
of_peers = pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)


@of_cases
def test_tensors_come_back_bitwise(peer, fields):
    theirs = peer.build(**fields)
    state, config = theirs.bfloat16().state_dict(), peer.family.config_from_hf(theirs.config.to_dict())
    peers.assert_bitwise(peer.family.to_hf(peer.family.from_hf(state, config), config), state)


@of_cases
def test_logits_and_gradients_are_theirs(peer, fields):
    peers.assert_same_function(peer.build(**fields), peer.family)


@of_cases
def test_config_comes_back_and_builds_their_model(peer, fields):
    theirs, family = peer.build(**fields), peer.family
    config = family.config_from_hf(theirs.config.to_dict())
    exported = family.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=7)
    assert detect(exported) == fitting(config) == family
    assert family.config_from_hf(exported) == config
    again = peer.model(peer.config(**exported))
    again.load_state_dict(family.to_hf(family.from_hf(theirs.state_dict(), config), config))
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@of_peers
def test_greedy_decoding_with_and_without_a_cache_is_theirs_token_for_token(peer):
    theirs = peer.build().eval()
    ours = peers.same_as_ours(theirs, peer.family).eval()
    prompt = [3, 1, 4, 1, 5]
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    [cached] = generate(ours, [prompt], 12, sampling=Sampling(temperature=0.0))
    assert [*prompt, *cached] == want
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat((tokens, ours(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    assert tokens[0].tolist() == want


@of_peers
def test_absent_fields_have_the_defaults_of_transformers(peer):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    required = {**sizes, "num_attention_heads": 32}
    bare = {"model_type": peer.family.model_type, **required}
    assert peer.family.config_from_hf(bare) == peer.family.config_from_hf(peer.config(**required).to_dict())


@of_peers
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be 'full_attention'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list; got 'full_attention'"),
        ({"mlp_bias": True}, "mlp_bias .* is a field that our model does not know"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu'"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(peer, fields, message):
    with pytest.raises(ConfigError, match=message):
        peer.family.config_from_hf(peer.build().config.to_dict() | fields)


def test_a_window_that_is_switched_off_is_none():
    fields = {"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}
    config = peers.qwen2().config.to_dict()
    assert QWEN2.config_from_hf(config | fields) == QWEN2.config_from_hf(config)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (LLAMA, {"qkv_bias": True}, r"qkv_bias must be False; got True"),
        (LLAMA, {"qk_norm": "RMSNorm"}, r"attention.qk_norm must be None; got 'RMSNorm'"),
        (QWEN2, {"qkv_bias": True, "softmax": "learnable"}, r"attention.softmax must be 'vanilla'; got 'learnable'"),
        (QWEN2, {}, r"qkv_bias must be True; got False"),
        (QWEN3, {"qk_norm": "L2"}, r"attention.qk_norm must be 'RMSNorm'; got 'L2'"),
        (QWEN3, {"qk_norm": "RMSNorm", "qkv_bias": True}, r"output_bias must be True; got False"),
        (QWEN3, {"qk_norm": "RMSNorm", "scale": 0.1}, r"attention.scale must be None; got 0.1"),
        (QWEN3, {"qk_norm": "RMSNorm", "logit_softcap": 5.0}, r"attention.logit_softcap must be None; got 5.0"),
        (QWEN3, {"qk_norm": "RMSNorm", "output_gate": True}, r"attention.output_gate must be False; got True"),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    model = TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2, attention=settings)
    with pytest.raises(ConfigError, match=message):
        family.require(model)


def test_a_missing_norm_is_named():
    theirs = peers.qwen3()
    state, config = theirs.state_dict(), QWEN3.config_from_hf(theirs.config.to_dict())
    del state["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.self_attn.k_norm.weight"):
        QWEN3.from_hf(state, config)
