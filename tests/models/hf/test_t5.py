"""models/hf/t5: names, numbers and configs against transformers' models."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import Family, detect, fitting, open_folder
from megalith.models.hf.t5 import FLAN_T5, T5
from megalith.models.t5_model import T5Model
from tests.models.hf import peers
from tests.models.test_t5_model import config as of_ours

SHAPE = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "dropout_rate": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One of our families, and fields that its config.json may have."""

    family: Family
    fields: dict[str, Any]

    def build(self) -> T5ForConditionalGeneration:
        config = T5Config(**SHAPE | self.fields, architectures=[self.family.architecture])
        torch.manual_seed(0)
        return peers.randomized(T5ForConditionalGeneration(config)).eval()


CASES = {
    "t5": Case(T5, {}),
    "t5, as many layers, usual buckets": Case(
        T5, {"num_decoder_layers": None, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    ),
    "t5, odd sizes": Case(T5, {"d_model": 33, "d_kv": 7, "num_heads": 3, "d_ff": 29, "feed_forward_proj": "gelu"}),
    "t5, another activation": Case(T5, {"feed_forward_proj": "gelu_new", "layer_norm_epsilon": 1e-3}),
    "flan-t5": Case(FLAN_T5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "flan-t5, scaled logits": Case(FLAN_T5, {"feed_forward_proj": "gated-gelu"}),
    "flan-t5, silu": Case(FLAN_T5, {"feed_forward_proj": "gated-silu", "num_decoder_layers": 1}),
}
of_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def settings_of(theirs: T5ForConditionalGeneration, family: Family) -> TransformerConfig:
    """Theirs saves no tensor for a tied head, whatever default their config class has."""
    return family.config_from_hf(theirs.config.to_dict(), theirs.state_dict().keys() - {"lm_head.weight"})


def with_own_head(theirs: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """As Google's FLAN-T5s are; transformers 5 ties the head of every config, so it is replaced afterwards."""
    head = torch.randn(61, 32, generator=torch.Generator().manual_seed(4)) / 32**0.5
    theirs.lm_head.weight = torch.nn.Parameter(head)
    return theirs


def ours_with_own_head(theirs: T5ForConditionalGeneration) -> T5Model:
    config = FLAN_T5.config_from_hf(theirs.config.to_dict() | {"tie_word_embeddings": False}, theirs.state_dict())
    assert not config.tie_word_embeddings
    ours = T5Model(config)
    ours.load_state_dict(FLAN_T5.from_hf(theirs.state_dict(), config))
    return ours.eval()


def ours_of(theirs: T5ForConditionalGeneration, family: Family) -> T5Model:
    config = settings_of(theirs, family)
    ours = T5Model(config)
    ours.load_state_dict(family.from_hf(theirs.state_dict(), config))
    return ours.eval()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens [3, 20], decoder tokens and labels [3, 14], and the masks of both sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 61, (3, 20), generator=generator)
    decoder_tokens, labels = torch.randint(2, 61, (2, 3, 14), generator=generator)
    mask = torch.arange(20) < torch.tensor([20, 7, 13])[:, None]
    decoder_mask = torch.arange(14) < torch.tensor([9, 14, 3])[:, None]
    return tokens, decoder_tokens, labels, mask, decoder_mask


@of_cases
def test_tensors_come_back_bitwise(case):
    theirs = case.build()
    config = settings_of(theirs, case.family)
    state = theirs.bfloat16().state_dict()
    peers.assert_bitwise(case.family.to_hf(case.family.from_hf(state, config), config), state)


@of_cases
def test_hidden_states_logits_and_gradients_are_theirs(case):
    theirs = case.build()
    assert_same_function(theirs, ours_of(theirs, case.family), case.family)


def test_hidden_states_logits_and_gradients_are_theirs_with_a_head_of_its_own():
    theirs = with_own_head(CASES["flan-t5"].build())
    assert_same_function(theirs, ours_with_own_head(theirs), FLAN_T5)


def assert_same_function(theirs: T5ForConditionalGeneration, ours: T5Model, family: Family) -> None:
    tokens, decoder_tokens, labels, mask, decoder_mask = batch()
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    want = theirs(
        tokens,
        labels=labels.where(decoder_mask, -100),
        decoder_input_ids=decoder_tokens,
        output_hidden_states=True,
        **{name: each.long() for name, each in masks.items()},
    )
    with torch.no_grad():
        encoded = ours(tokens, attention_mask=mask)
        torch.testing.assert_close(encoded[mask], want.encoder_last_hidden_state[mask], rtol=0, atol=1e-5)
        hidden = ours(tokens, decoder_tokens, output="hidden", **masks)
        of_decoder = want.decoder_hidden_states[-1]
        torch.testing.assert_close(hidden[decoder_mask], of_decoder[decoder_mask], rtol=0, atol=1e-5)
        logits = ours(tokens, decoder_tokens, **masks)
        torch.testing.assert_close(logits[decoder_mask], want.logits[decoder_mask], rtol=0, atol=1e-5)
    loss = ours(tokens, decoder_tokens, labels=labels, **masks)[decoder_mask].mean()
    torch.testing.assert_close(loss, want.loss, rtol=1e-6, atol=0)
    want.loss.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters(remove_duplicate=False)}
    wanted = family.from_hf(gradients, ours.config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@of_cases
def test_an_exported_folder_loads_in_transformers_without_warnings_and_can_be_imported_again(
    case, tmp_path, recwarn, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # else caplog sees none of its lines
    theirs, family = case.build(), case.family
    config = settings_of(theirs, family)
    exported = family.config_to_hf(config, max_position_embeddings=512, dtype="float32", eos_token_id=1)
    assert detect(exported) == fitting(config) == family
    assert family.config_from_hf(exported, ["shared.weight"]) == config
    state = family.to_hf(family.from_hf(theirs.state_dict(), config), config)
    folder = tmp_path / "model"
    folder.mkdir()
    in_file = {key: tensor for key, tensor in state.items() if key not in family.copies(config)}
    save_file(in_file, folder / "model.safetensors", {"format": "pt"})
    T5Config(**exported).save_pretrained(folder)
    again, told = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    assert not caplog.records
    assert [warning.message for warning in recwarn] == []
    peers.assert_bitwise(again.state_dict(), theirs.state_dict())
    assert again.config.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    back = open_folder(folder)
    assert back.config == config
    peers.assert_bitwise(
        {name: back.weights.read(name) for name in back.weights.tensors}, family.from_hf(state, config)
    )


def untied_folder(tmp_path) -> tuple[T5ForConditionalGeneration, dict[str, Tensor]]:
    """Writes a FLAN-T5 like Google's files, with its own head, to ``tmp_path``; also returns its tensors."""
    theirs = CASES["flan-t5"].build()
    head = torch.randn(61, 32, generator=torch.Generator().manual_seed(4))
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    state = {key: tensor for key, tensor in theirs.state_dict().items() if key not in copies}
    state["lm_head.weight"] = head
    save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    return theirs, state


def test_a_head_that_files_have_is_read_and_written(tmp_path):
    theirs, state = untied_folder(tmp_path)
    T5Config(**SHAPE | CASES["flan-t5"].fields).save_pretrained(tmp_path)
    as_google_writes = theirs.config.to_dict() | {"tie_word_embeddings": False}
    del as_google_writes["scale_decoder_outputs"]
    for hf_config in (as_google_writes, theirs.config.to_dict()):
        config = FLAN_T5.config_from_hf(hf_config, state)
        assert not config.tie_word_embeddings
        assert config.multipliers.logits == 1.0
    ours = T5Model(config)
    ours.load_state_dict(FLAN_T5.from_hf(state, config))
    copies = {f"{stack}.embed_tokens.weight": state["shared.weight"] for stack in ("encoder", "decoder")}
    peers.assert_bitwise(FLAN_T5.to_hf(ours.state_dict(), config), state | copies)
    exported = FLAN_T5.config_to_hf(config, max_position_embeddings=512, dtype="float32", eos_token_id=1)
    assert not exported["tie_word_embeddings"]
    assert FLAN_T5.config_from_hf(exported, state) == config
    theirs.lm_head.weight = torch.nn.Parameter(state["lm_head.weight"])
    tokens, decoder_tokens, *_ = batch()
    with torch.no_grad():
        want = theirs(tokens, decoder_input_ids=decoder_tokens).logits
        torch.testing.assert_close(ours.eval()(tokens, decoder_tokens), want, rtol=0, atol=2e-5)  # up to 40


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "silu"}, r"feed_forward_proj must be one of relu, .*got 'silu'"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn must be 'relu' if feed_forward_proj is 'relu'; got 'gelu'"),
        ({"is_gated_act": True}, "is_gated_act must be False"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder must be True"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"num_experts": 8}, r"num_experts \(8\) is a field that Megalith does not know"),
        ({"num_decoder_layers": "two"}, "num_decoder_layers must be an integer"),
        ({"d_kv": None}, "lacks required fields: d_kv"),
        ({"relative_attention_num_buckets": 6}, "must be divisible by 4"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        T5.config_from_hf(T5Config(**SHAPE).to_dict() | fields)


def test_absent_fields_have_the_defaults_of_transformers():
    required = {name: SHAPE[name] for name in T5.sizes}
    assert T5.config_from_hf({"model_type": "t5", **required}) == T5.config_from_hf(T5Config(**required).to_dict())


def test_a_table_of_old_files_that_no_layer_reads_is_left_out():
    theirs = CASES["t5"].build()
    config = settings_of(theirs, T5)
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    old = theirs.state_dict() | {unread: torch.ones(8, 4)}
    peers.assert_bitwise(T5.from_hf(old, config), T5.from_hf(theirs.state_dict(), config))


def test_an_embedding_that_differs_from_its_other_name_is_refused():
    theirs = CASES["t5"].build()
    state = theirs.state_dict() | {"decoder.embed_tokens.weight": torch.ones(61, 32)}
    with pytest.raises(CheckpointError, match=r"decoder\.embed_tokens\.weight must equal shared\.weight"):
        T5.from_hf(state, settings_of(theirs, T5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "swiglu"}, r"activation must be 'relu' or 'gelu' or 'gelu_tanh'; got 'swiglu'"),
        ({"attention": {}}, r"attention.scale must be 1.0; got None"),
        ({"attention_dropout": 0.1}, r"attention_dropout must be 0.0; got 0.1"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings must be True; got False"),
        ({"multipliers": {"logits": 3.0}}, r"multipliers.logits must be 0.17.* or 1.0; got 3.0"),
        ({"add_bias_linear": True}, r"add_bias_linear must be False; got True"),
        ({"normalization": "LayerNorm"}, r"normalization must be 'RMSNorm'"),
        ({"residual": {"norm_placement": "sandwich"}}, r"norm_placement must be 'pre'; got 'sandwich'"),
    ],
)
def test_a_model_that_is_none_of_theirs_is_not_written_as_one(fields, message):
    T5.require(of_ours())
    with pytest.raises(ConfigError, match=message):
        T5.require(of_ours(**fields))


def test_a_model_of_another_kind_is_not_written_as_a_t5():
    with pytest.raises(ConfigError, match=r"position_embedding_type must be 'relative'; got 'rope'"):
        T5.require(TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2))
