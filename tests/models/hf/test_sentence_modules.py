"""models/hf/sentence_modules: embedding models of sentence-transformers, and what our head cannot compute."""

import json
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertForMaskedLM, BertForSequenceClassification, RoFormerForMaskedLM

from megalith.errors import CheckpointError, ConfigError
from megalith.models.bert_model import BertModel
from megalith.models.hf import detect, fitting, open_folder, read_folder
from megalith.models.hf.bert import BERT_EMBEDDING, BERT_MASKED_LM
from megalith.models.hf.roformer import ROFORMER_EMBEDDING
from tests.models.hf import peers
from tests.models.hf.sentences import KINDS, change, encoder, their_embeddings, write_sentence_model

WAYS = list(product(("cls", "mean"), (None, 8), (True, False)))  # pooling, size, normalize
POOLER = ("pooler.dense.bias", "pooler.dense.weight")
TABLE = "encoder.embed_positions.weight"


def ours_of(folder) -> BertModel:
    config, state = read_folder(folder)
    ours = BertModel(config)
    ours.load_state_dict(state)
    return ours.eval()


def texts(kind: str) -> tuple[Tensor, Tensor]:
    """Tokens and mask [3, 12], without the padding token, whose embedding theirs would not train."""
    mask = torch.arange(12) < torch.tensor([12, 7, 2])[:, None]
    tokens = torch.randint(2, 61, (3, 12), generator=torch.Generator().manual_seed(1))
    return tokens.where(mask, 1 if kind == "roberta" else 0), mask


@pytest.mark.parametrize("version", ["old", "new"])
@pytest.mark.parametrize(("pooling", "size", "normalize"), WAYS)
def test_embeddings_of_padded_texts_are_theirs(pooling, size, normalize, version, tmp_path):
    theirs = write_sentence_model(tmp_path, "bert", version, pooling=pooling, size=size, normalize=normalize)
    tokens, mask = texts("bert")
    with torch.no_grad():
        hidden = theirs(tokens, attention_mask=mask.long()).last_hidden_state
        want = their_embeddings(hidden, mask, tmp_path, pooling, size, normalize)
        torch.testing.assert_close(ours_of(tmp_path)(tokens, attention_mask=mask), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_and_gradients_of_every_encoder_are_theirs(kind, tmp_path):
    theirs = write_sentence_model(tmp_path, kind, size=8)
    ours, (tokens, mask) = ours_of(tmp_path), texts(kind)
    hidden = theirs(tokens, attention_mask=mask.long()).last_hidden_state
    want = their_embeddings(hidden, mask, tmp_path, "mean", 8, normalize=True)
    found = ours(tokens, attention_mask=mask)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    towards = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    for embeddings in (found, want):
        (embeddings * towards).sum().backward()
    dense = {f"2_Dense/linear.{part}": torch.zeros(size) for part, size in (("weight", (8, 32)), ("bias", (8,)))}
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None} | dense
    wanted = fitting(ours.config).from_hf(gradients, ours.config)
    for name, parameter in ours.named_parameters():
        if not name.startswith("embedder."):
            torch.testing.assert_close(
                parameter.grad, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_headless_encoder_without_modules_has_our_defaults_and_a_line_says_so(kind, tmp_path):
    encoder(kind).save_pretrained(tmp_path)
    found = open_folder(tmp_path)
    assert found.architecture == KINDS[kind][0].__name__
    assert (found.config.bert.embedding_pooling, found.config.bert.normalize_embeddings) == ("mean", True)
    assert found.config.bert.embedding_size is None
    unread = () if kind == "roformer" else POOLER  # theirs has none
    assert found.unread == unread
    first, *others = found.notes
    assert f"{tmp_path} has no modules.json" in first
    assert "set model.bert.embedding_pooling" in first
    assert bool(others) == bool(unread)
    assert all("2 tensors of" in line and "pooler.dense.weight" in line for line in others)


def test_a_folder_that_says_all_has_only_the_line_about_its_pooler(tmp_path):
    write_sentence_model(tmp_path, "bert", "new", size=8)
    [line] = open_folder(tmp_path).notes
    assert line.endswith("because no embedding depends on them: pooler.dense.bias, pooler.dense.weight")


@pytest.mark.parametrize(
    ("name", "fields", "normalize", "line"),
    [
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}, True, "prompts .*'query: '"),
        ("sentence_bert_config.json", {"do_lower_case": True}, True, r"lowercased texts \(do_lower_case\)"),
        ("config_sentence_transformers.json", {}, False, "'cosine' similarity but does not normalize"),
    ],
)
def test_a_line_says_what_depends_on_texts_and_similarities(name, fields, normalize, line, tmp_path):
    write_sentence_model(tmp_path, "roformer", normalize=normalize)  # has no pooler
    change(tmp_path, name, **fields)
    [told] = open_folder(tmp_path).notes
    assert re.search(line, told)


def test_dot_products_of_embeddings_that_are_not_normalized_need_no_line(tmp_path):
    write_sentence_model(tmp_path, "roformer", normalize=False)
    change(tmp_path, "config_sentence_transformers.json", similarity_fn_name="dot")
    assert open_folder(tmp_path).notes == ()


@pytest.mark.parametrize("with_head", [BertForMaskedLM, RoFormerForMaskedLM])
def test_modules_count_more_than_the_architecture_and_its_head_is_not_read(with_head, tmp_path):
    kind = "bert" if with_head is BertForMaskedLM else "roformer"
    write_sentence_model(tmp_path, kind, "old", pooling="cls")
    theirs = peers.randomized(with_head(encoder(kind).config))
    theirs.save_pretrained(tmp_path)
    found = open_folder(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [with_head.__name__]
    assert found.architecture == KINDS[kind][0].__name__
    assert all(key.startswith("cls.predictions.") for key in found.unread)
    want = found.family.from_hf(theirs.base_model.state_dict(), found.config)
    peers.assert_bitwise({name: found.weights.read(name) for name in found.weights.tensors}, want)
    if kind == "roformer":  # its constant table is checked under the longer name too
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[f"roformer.{TABLE}"][3, 3] = 0.5
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"{TABLE} differs from the table"):
            open_folder(tmp_path)


def test_a_tensor_under_both_names_is_refused(tmp_path):
    write_sentence_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"] = tensors["embeddings.LayerNorm.bias"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: bert\.embeddings\.LayerNorm\.bias"):
        open_folder(tmp_path)


def test_a_cross_encoder_keeps_the_head_that_its_architecture_names(tmp_path):
    write_sentence_model(tmp_path, "bert", "new")
    config = encoder("bert", num_labels=3).config
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    change(tmp_path, "config_sentence_transformers.json", model_type="CrossEncoder")
    assert open_folder(tmp_path).config.bert.head == "classification"


def test_modules_of_a_decoder_are_not_looked_at(tmp_path):
    write_sentence_model(tmp_path, "bert", pooling="max")
    llama = peers.llama()
    llama.save_pretrained(tmp_path)
    assert open_folder(tmp_path).architecture == "LlamaForCausalLM"


def test_modules_are_not_needed_to_choose_the_class():
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert detect(config) == BERT_MASKED_LM
    assert detect(config, embeds=True) == detect({**config, "architectures": ["BertModel"]}) == BERT_EMBEDDING
    assert detect({"model_type": "roformer", "architectures": ["RoFormerModel"]}) == ROFORMER_EMBEDDING


def modules(*names: str, package: str = "sentence_transformers.models", path: str | None = None) -> str:
    """The content of modules.json; ``path`` replaces that of the last module."""
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"{package}.{name}"}
        for i, name in enumerate(names)
    ]
    entries[-1]["path"] = entries[-1]["path"] if path is None else path
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (modules("Transformer"), "must be Transformer, Pooling, at most one Dense.*; got Transformer; to"),
        (modules("Transformer", "Pooling", "Dense", "Dense"), "got Transformer, Pooling, Dense, sentence_transformers"),
        (modules("Transformer", "Pooling", "Normalize", "Dense"), "got Transformer, Pooling, Normalize, Dense"),
        (modules("Transformer", "Pooling", "LayerNorm"), "got Transformer, Pooling, LayerNorm"),
        (modules("Transformer", "Pooling", package="my_code"), "all of sentence_transformers; got my_code.Transformer"),
        (modules("Transformer", "Pooling", path="../elsewhere"), "that of a folder inside; Pooling has '../elsewhere'"),
        (modules("Transformer", "Pooling", path=".."), "that of a folder inside; Pooling has '..'"),
        (modules("Transformer", "Pooling", path="/etc"), "that of a folder inside; Pooling has '/etc'"),
        (modules("Transformer", "Pooling", path="a\0b"), "that of a folder inside; Pooling has"),
        (modules("Transformer", "Pooling", path=""), "that of a folder inside; Pooling has ''"),
        (
            modules("Transformer", "Pooling").replace('"path": ""', '"path": "0_Transformer"'),
            "Transformer must have the path '', .*Transformer has '0_Transformer'",
        ),
        ("[]", "must be Transformer, Pooling"),
        ("[3]", "each module must have a type and a path; got 3"),
        ('[{"type": "a.B", "path": ["x"]}]', "each module must have a type and a path"),
        (json.dumps([{"type": f"a.B{i}", "path": f"{i}"} for i in range(1000)]), "must be Transformer, Pooling"),
    ],
)
def test_other_modules_are_refused_with_a_way_out(content, message, tmp_path):
    write_sentence_model(tmp_path)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/modules.json describes embeddings.*{message}.*remove modules"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, r"got \['mean', 'pooling_mode_max_tokens'\]"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, r"cls or mean; got \['cls', 'mean'\]"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, r"cls or mean; got \[\]"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "cls or mean; got 'lasttoken'"),
        ("1_Pooling/config.json", {"pooling_mode": {"a": 1}}, "cls or mean; got {'a': 1}"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 31}, "word_embedding_dimension must be 32; got 31"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt must be True; got False"),
        ("1_Pooling/config.json", {"scale": 2}, r"scale \(2\) is a field that Megalith does not know"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Tanh"}, "Identity.*got .*Tanh"),
        ("2_Dense/config.json", {"activation_function": None}, "Identity.*got 'torch.nn.modules.activation.Tanh'"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "got 'os.system'"),
        ("2_Dense/config.json", {"bias": False}, "bias must be True; got False"),
        ("2_Dense/config.json", {"in_features": 33}, "in_features must be 32; got 33"),
        ("2_Dense/config.json", {"out_features": 0}, "out_features must be a positive integer; got 0"),
        ("2_Dense/config.json", {"out_features": "8"}, "out_features must be a positive integer; got '8'"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual must be False; got True"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "must be 'sentence_embedding'; got"),
        ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, "must be 'sentence_embedding'; got"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'feature-extraction'; got 'fill-mask'"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config_args must be {} or None"),
    ],
)
def test_what_our_head_cannot_compute_is_refused_by_field(name, fields, message, tmp_path):
    write_sentence_model(tmp_path, size=8)
    (tmp_path / "3_Normalize").mkdir()
    change(tmp_path, name, **fields)
    with pytest.raises(ConfigError, match=f"{name} describes embeddings .*{message}.*remove modules.json") as refusal:
        open_folder(tmp_path)
    assert len(str(refusal.value)) < 800


def test_the_way_out_of_a_refusal_imports_the_encoder(tmp_path):
    write_sentence_model(tmp_path, pooling="max")
    with pytest.raises(ConfigError, match="pooling_mode must be"):
        open_folder(tmp_path)
    (tmp_path / "modules.json").unlink()
    assert open_folder(tmp_path).config.bert.head == "embedding"


def test_other_kinds_of_sentence_models_are_refused_by_name(tmp_path):
    write_sentence_model(tmp_path)
    change(tmp_path, "config_sentence_transformers.json", model_type="MultiVectorEncoder")
    with pytest.raises(ConfigError, match="model_type must be 'SentenceTransformer'; got 'MultiVectorEncoder'"):
        open_folder(tmp_path)


def only_a_pickle(folder):
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def without_bias(folder):
    weight = load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"]
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors", {"format": "pt"})


def another_size(folder):
    change(folder, "2_Dense/config.json", out_features=9)


def too_large(folder):
    (folder / "modules.json").write_text("[" + " " * (1 << 24) + "]")


def nested(folder):
    (folder / "modules.json").write_text("[" * 100_000)


def an_object(folder):
    (folder / "modules.json").write_text("{}")


def no_pooling(folder):
    (folder / "1_Pooling" / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            only_a_pickle,
            r"2_Dense must contain model\.safetensors .*pytorch_model\.bin, but pickle files are never",
        ),
        (without_bias, r"missing: 2_Dense/linear\.bias"),
        (another_size, r"wrong shape: 2_Dense/linear\.weight must be \[9, 32\]; got \[8, 32\]"),
        (too_large, r"modules\.json has 16,777,218 bytes; the limit is 16,777,216"),
        (nested, r"modules\.json is not JSON"),
        (an_object, r"modules\.json must contain a JSON list; it contains a dict"),
        (no_pooling, r"cannot read .*1_Pooling/config\.json: No such file"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(damage, message, tmp_path):
    write_sentence_model(tmp_path, size=8)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)


def test_the_folder_of_a_projection_may_have_any_name(tmp_path):
    write_sentence_model(tmp_path, size=8)
    (tmp_path / "2_Dense").rename(tmp_path / "projection")
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[2]["path"] = "projection"
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    found = open_folder(tmp_path)
    want = load_file(tmp_path / "projection" / "model.safetensors")
    assert found.weights.read("embedder.projection.weight").equal(want["linear.weight"])
    assert found.weights.read("embedder.projection.bias").equal(want["linear.bias"])


def test_a_published_encoder_is_still_pretrained_without_modules(tmp_path):
    AutoModelForMaskedLM.from_config(encoder("bert").config).save_pretrained(tmp_path)
    assert open_folder(tmp_path).config.bert.head == "pretraining"
