"""Text embeddings: packed into rows, each is that of its text alone; what is no embedding model is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from megalith.config import load_run
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError, ShapeError
from megalith.models.bert_model import BertModel
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.passage_search import index_passages
from megalith.training.tasks.text_embeddings import TextEmbedder
from tests.program import here, write_settings
from tests.tiny_masked import masked_settings, write_sentences
from tests.tiny_pairs import embedding_settings
from tests.training.tasks.conversion.folders import write_folder

ALONE = 1e-12  # of embeddings in float64: sums of the same numbers in another order
FIRST = {"embedding_pooling": "first", "normalize_embeddings": False}
PROJECTED = {"embedding_size": 8}
TEXTS = ["the red house", "a", "", "one two " * 40, "the river runs", "the red house", "two trees and\nthe river " * 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sentences with a tokenizer."""
    folder = tmp_path_factory.mktemp("sentences")
    write_sentences(folder)
    return folder


def embedder(folder, bert: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64) -> TextEmbedder:
    config = load_run(embedding_settings(folder, bert))
    model = BertModel(config.model, BuildOptions(ProcessGroupCollection.single(), dtype), seed=7).eval()
    return TextEmbedder(model, Tokenizer.load(folder / "text-tokenizer.json"), config.data.seq_length)


def alone(found: TextEmbedder, text: str, bert: dict[str, Any]) -> Tensor:
    """The embedding [D] of ``text``, from the hidden states of a row that has nothing else."""
    special = bert_tokens(found.tokenizer)
    ids = found.tokenizer.encode(text)[: found.longest - 2]
    tokens = torch.tensor([[special.classifier, *ids, special.separator]])
    hidden = found.model(tokens, output="hidden")
    assert isinstance(hidden, Tensor)
    state = hidden[0, 0] if bert.get("embedding_pooling") == "first" else hidden[0].mean(0)
    if "embedding_size" in bert:
        weights = dict(found.model.named_parameters())
        state = weights["embedder.projection.weight"] @ state + weights["embedder.projection.bias"]
    return normalize(state, dim=0) if bert.get("normalize_embeddings", True) else state


@pytest.mark.parametrize("bert", [{}, FIRST, PROJECTED])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_each_text_has_the_embedding_that_it_has_alone(batch_size, bert, folder):
    found = embedder(folder, bert)
    want = torch.stack([alone(found, text, bert) for text in TEXTS])
    got = found.embed(TEXTS, batch_size=batch_size)
    assert (got.dtype, got.requires_grad) == (torch.float64, False)
    assert (got - want).abs().max() < ALONE
    assert (got[0] - got[1]).abs().max() > 1e-3  # texts do differ


@pytest.mark.parametrize("seed", range(5))
def test_any_lengths_in_any_order_stay_apart(seed, folder):
    found, random = embedder(folder), np.random.default_rng(seed)
    texts = [random.integers(5, 300, random.integers(1, found.longest + 1)).tolist() for _ in range(30)]
    got = found.embed_tokens(texts, batch_size=3)
    for text, embedding in zip(texts, got, strict=True):
        own = found.embed_tokens([text])
        state = found.model(torch.tensor([text]), output="hidden")
        assert (own[0] - embedding).abs().max() < ALONE
        assert (normalize(state[0].mean(0), dim=0) - embedding).abs().max() < ALONE


def test_rows_are_full(folder):
    found, num_rows = embedder(folder, dtype=torch.float32), []
    found.model.register_forward_pre_hook(lambda _, arguments: num_rows.append(len(arguments[0])))
    found.embed_tokens([[7] * length for length in (3, 29, 30, 2, 16, 8, 8, 32)], batch_size=2)
    assert num_rows == [2, 2]  # 128 tokens in rows of 32


def test_a_model_in_float32_gives_float32(folder):
    assert embedder(folder, dtype=torch.float32).embed(["a"]).dtype == torch.float32
    assert embedder(folder, PROJECTED, torch.float32).embed([]).shape == (0, 8)


def test_a_long_text_is_truncated_at_the_end_and_counted(folder, caplog):
    found = embedder(folder)
    long = "two red trees " * 30
    caplog.set_level("WARNING")
    [cut, _] = found.embed([long, "a"])
    assert "truncated 1 of 2 texts to the 32 tokens that fit into a row" in caplog.text
    first, other = found.encode([long, "a"])
    assert (len(first.tokens), first.was_cut, other.was_cut) == (32, True, False)
    assert (first.tokens[0], first.tokens[-1]) == (other.tokens[0], other.tokens[-1])
    assert list(first.tokens[1:-1]) == found.tokenizer.encode(long)[:30]
    assert torch.equal(found.embed([long + "and more"])[0], cut)


def test_a_text_of_exactly_the_longest_length_is_not_cut(folder):
    found = embedder(folder)
    [one] = found.encode(["a"])
    text = "a" * (30 // (len(one.tokens) - 2))
    exact = [len(each.tokens) for each in found.encode([text, text + " a a a a"])]
    assert exact[0] <= 32 == exact[1]
    for length in range(1, 60):
        [each] = found.encode([" a" * length])
        assert each.was_cut == (len(found.tokenizer.encode(" a" * length)) > 30)


def test_a_text_of_several_pieces_is_read_as_far_as_it_fits(folder):
    found = TextEmbedder(embedder(folder).model, embedder(folder).tokenizer, 1 << 20)
    text = "\n".join(["the red house runs"] * 9000)  # 170,000 characters
    [encoded] = found.encode([text])
    assert not encoded.was_cut
    assert found.tokenizer.decode(list(encoded.tokens[1:-1])) == text


def test_progress_counts_texts(folder):
    seen: list[tuple[int, int]] = []
    embedder(folder, dtype=torch.float32).embed(
        ["two red trees"] * 9, batch_size=1, progress=lambda *at: seen.append(at)
    )
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    assert seen == sorted(seen)
    assert len(seen) > 2


def test_what_cannot_be_embedded_is_refused(folder):
    found = embedder(folder)
    with pytest.raises(ConfigError, match="batch size must be 1 or more rows of 32 tokens; got 0"):
        found.embed(["a"], batch_size=0)
    for length in (0, 33):
        with pytest.raises(ShapeError, match=f"must have 1 to 32 tokens; got {length} to {length}"):
            found.embed_tokens([[5] * length])


def test_a_run_and_its_checkpoint_embed_as_the_trained_model_does(folder, tmp_path):
    tree = embedding_settings(folder, train={"steps": 2}) | {"run": str(tmp_path / "run")}
    ended = here("train", write_settings(tree, tmp_path))
    assert ended.code == 0, ended
    found = TextEmbedder.load(tmp_path / "run")
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    want = torch.stack([alone(found, text, {}) for text in TEXTS])
    for source in (tmp_path / "run", checkpoint):
        assert (TextEmbedder.load(source).embed(TEXTS) - want).abs().max() < 1e-5  # float32
    assert (found.embed(TEXTS) - embedder(folder, dtype=torch.float32).embed(TEXTS)).abs().max() > 1e-3


def test_texts_are_truncated_to_the_table_of_positions_which_may_be_shorter_than_a_row(folder, tmp_path):
    tree = embedding_settings(folder, train={"steps": 1}, model={"max_position_embeddings": 8})
    assert here("train", write_settings(tree | {"run": str(tmp_path / "run")}, tmp_path)).code == 0
    found = TextEmbedder.load(tmp_path / "run")
    assert found.longest == 8
    (tmp_path / "a.txt").write_text("one red house finds the two trees and a green river")
    assert index_passages(tmp_path / "run", [tmp_path / "a.txt"], tmp_path / "index").longest == 8
    want = torch.stack([alone(found, text, {}) for text in TEXTS])
    assert (found.embed(TEXTS) - want).abs().max() < 1e-5  # float32


def test_other_models_are_refused_with_a_way_out(folder, tmp_path):
    tree = masked_settings(folder, train={"steps": 1}) | {"run": str(tmp_path / "run")}
    assert here("train", write_settings(tree, tmp_path)).code == 0
    with pytest.raises(
        ConfigError,
        match=r"must be an embedding model.*it has model\.bert\.head=pretraining; train one: megalith train",
    ):
        TextEmbedder.load(tmp_path / "run")
    write_folder(tmp_path / "hf", "roformer")
    with pytest.raises(ConfigError, match=r"it is a model of Hugging Face or Megatron.*embedding-tiny --from"):
        TextEmbedder.load(tmp_path / "hf")
    tree = embedding_settings(folder, train={"steps": 1}) | {"run": str(tmp_path / "embeds")}
    assert here("train", write_settings(tree, tmp_path)).code == 0
    assert here("convert", "export", tmp_path / "embeds", "--out", tmp_path / "exported", "--no-proof").code == 0
    with pytest.raises(ConfigError, match=r"import it: megalith convert import .*exported --out RUN"):
        TextEmbedder.load(tmp_path / "exported")
    with pytest.raises(CheckpointError, match="does not exist"):
        TextEmbedder.load(tmp_path / "none")
