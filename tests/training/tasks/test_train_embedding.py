"""An embedding model: its loss and measures computed from each text alone, and the same in every layout."""

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import normalize

from megalith.config import BertConfig, TransformerConfig, load_run
from megalith.data.pairs.dataset import PairSample
from megalith.errors import ConfigError, DataError
from megalith.models.bert_model import BertModel
from megalith.numerics.tolerance import LAYOUT_FLOAT64, gradient_error
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.origin import settings_from
from megalith.training.tasks.task import JointTask
from megalith.training.tasks.train_embedding import EmbeddingInputs, TrainEmbedding
from tests.rank_pool import ranks
from tests.tiny_pairs import NUM_NEGATIVES, embedding_settings
from tests.training.on_ranks import first_steps
from tests.training.outcomes import run_here
from tests.training.reference import Trajectory, differences

FIRST = {"embedding_pooling": "first", "normalize_embeddings": False, "similarity_temperature": 1.0}
PROJECTED = {"embedding_size": 8}


def steps(tree: dict[str, Any], world_size: int, num_steps: int = 2) -> Trajectory:
    return first_steps(tree, world_size, num_steps)


def embedded(model: BertModel, text: np.ndarray, bert: dict[str, Any]) -> Tensor:
    """The embedding [D] of a text on its own, from the model's hidden states."""
    hidden = model(torch.from_numpy(text[None]), output="hidden")[0]  # [S, H]
    assert isinstance(hidden, Tensor)
    assert model.embedder is not None
    state = hidden[0] if bert.get("embedding_pooling") == "first" else hidden.mean(0)
    if "embedding_size" in bert:
        weights = dict(model.embedder.named_parameters())
        state = weights["projection.weight"] @ state + weights["projection.bias"]
    return normalize(state, dim=0) if bert.get("normalize_embeddings", True) else state


def losses_of(samples: list[PairSample], model: BertModel, bert: dict[str, Any]) -> list[Tensor]:
    """The loss of each query, one at a time, among all passages that are not known to answer it."""
    queries = [embedded(model, sample.texts[0], bert) for sample in samples]
    passages = [
        (row, place, text.tobytes(), embedded(model, text, bert))
        for row, sample in enumerate(samples)
        for place, text in enumerate(sample.texts[1:])
    ]
    found = []
    for row, sample in enumerate(samples):
        scores, own = [], torch.tensor(0.0)
        for other, place, text, embedding in passages:
            same_query = place == 0 and samples[other].texts[0].tobytes() == sample.texts[0].tobytes()
            is_own = (other, place) == (row, 0)
            if is_own or not (same_query or text == sample.texts[1].tobytes()):
                scores.append(queries[row] @ embedding / bert.get("similarity_temperature", 0.05))
                own = scores[-1] if is_own else own
        found.append(torch.stack(scores).logsumexp(0) - own)
    return found


@pytest.mark.parametrize("bert", [{}, PROJECTED, FIRST])
@pytest.mark.parametrize("micro_batch_size", [2, 24])
def test_a_step_takes_the_gradient_of_all_texts_compared_with_each_other(micro_batch_size, bert, tmp_path):
    train = {"micro_batch_size": micro_batch_size, "global_batch_size": 24}  # an epoch, with equal texts in it
    without_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    tree = embedding_settings(tmp_path, bert, train=train, model=without_dropout, optim={"clip_norm": 1e6})
    [found] = ranks(1, steps, tree, 1)
    config = load_run(tree)
    task = task_of(config)
    model = BertModel(config.model, BuildOptions(ProcessGroupCollection.single(), torch.float64), seed=1234)
    samples = [task.train_dataset()[number] for number in range(24)]
    loss = torch.stack(losses_of(samples, model, tree["model"]["bert"])).mean()
    loss.backward()
    assert found.losses[0] == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert gradient_error(found.gradients[0][name], want, found.norms[0]) < LAYOUT_FLOAT64, name


@pytest.mark.parametrize(
    ("parallel", "bert"),
    [
        ({"shard": 2}, {}),
        ({"tensor": 2, "sequence": True}, PROJECTED),
        ({"context": 2}, PROJECTED),
        pytest.param({"context": 2}, FIRST, marks=pytest.mark.slow),
        pytest.param({"context": 2, "context_method": "all_gather"}, {}, marks=pytest.mark.slow),
        ({"pipeline": 2}, FIRST),
        pytest.param({"replicate": 2}, FIRST, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, FIRST, marks=pytest.mark.slow),
        pytest.param({"shard": 2, "context": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"shard": 2, "pipeline": 2}, PROJECTED, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "replicate": 2}, PROJECTED, marks=pytest.mark.slow),
    ],
)
def test_every_layout_and_micro_batch_size_learns_the_same(parallel, bert, tmp_path):
    tree = embedding_settings(tmp_path, bert)  # with dropout, in two passes or one
    assert tree["model"]["hidden_dropout"] > 0
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 8}}, 1)
    num_ranks = int(np.prod([size for size in parallel.values() if type(size) is int]))
    for found in ranks(num_ranks, steps, {**tree, "parallel": parallel}, num_ranks):
        assert differences(found, want) == []


@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "zb_v", "virtual": 2},  # the first and the last stage are on the same rank
        pytest.param({"schedule": "zero_bubble"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "interleaved", "virtual": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_pipeline_schedule_learns_the_same(schedule, tmp_path):
    tree = embedding_settings(tmp_path, PROJECTED, model={"num_layers": 4})
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 8}}, 1)
    for found in ranks(2, steps, {**tree, "parallel": {"pipeline": 2, **schedule}}, 2):
        assert differences(found, want) == []


@pytest.mark.parametrize("recompute", [None, pytest.param("full", marks=pytest.mark.slow)])
def test_steps_of_one_micro_batch_and_of_several_follow_each_other(recompute, tmp_path):
    schedule = {"global_batch_size": None, "batch_size_schedule": "0:4 4:8 12:16"}
    tree = embedding_settings(tmp_path, train={**schedule, "recompute": recompute})
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 4, "recompute": None}}, 1, 3)
    for found in ranks(2, steps, {**tree, "parallel": {"shard": 2}}, 2, 3):
        assert differences(found, want) == []


def test_a_step_of_one_micro_batch_per_rank_learns_the_same(tmp_path):
    tree = embedding_settings(tmp_path)
    [want] = ranks(1, steps, tree, 1)
    train = {**tree["train"], "micro_batch_size": 4}
    for found in ranks(2, steps, {**tree, "train": train, "parallel": {"shard": 2}}, 2):
        assert differences(found, want) == []


def evaluation(tree: dict[str, Any], world_size: int, max_samples: int | None = None) -> Evaluation:
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    pairs = run.task.evaluation_dataset(tree["data"]["train"])
    return evaluate(run.task, run.pipeline, pairs, 2, options=run.options, device=run.device, max_samples=max_samples)


def test_measures_are_those_of_all_held_out_pairs(tmp_path):
    # held-out batches are as large as the last ones of training
    schedule = {"global_batch_size": None, "batch_size_schedule": "0:4 4:8"}
    tree = embedding_settings(tmp_path, PROJECTED, train=schedule)
    [found] = ranks(1, evaluation, tree, 1, 19)  # not all pairs; the last micro-batch has a row of padding
    config = load_run(tree)
    task, bert = task_of(config), tree["model"]["bert"]
    options = BuildOptions(ProcessGroupCollection.single(), torch.float64)
    model = BertModel(config.model, options, seed=1234).eval()
    pairs = task.evaluation_dataset(tree["data"]["train"])
    samples = [pairs[number * 24 // 19] for number in range(19)]
    with torch.no_grad():
        # the three samples that remain are in a batch with the five before them
        of_batches = [losses_of(samples[first : first + 8], model, bert) for first in (0, 8, 11)]
        of_batches[2] = of_batches[2][5:]
        # of two equal scores the positive is behind, so its place is one more than the passages with a higher one
        queries = torch.stack([embedded(model, sample.texts[0], bert) for sample in samples])
        passages = torch.stack([embedded(model, text, bert) for sample in samples for text in sample.texts[1:]])
    scores = queries @ passages.t()
    per_row, places = 1 + NUM_NEGATIVES, []
    for row, sample in enumerate(samples):
        others = [
            scores[row, other * per_row + place]
            for other in range(19)
            for place, text in enumerate(samples[other].texts[1:])
            if not (np.array_equal(text, sample.texts[1]))
            and not (place == 0 and np.array_equal(samples[other].texts[0], sample.texts[0]))
        ]
        places.append(1 + sum(bool(score >= scores[row, row * per_row]) for score in others))
    assert found.counts == dict.fromkeys(
        ["contrastive", "top_1_accuracy", "top_5_accuracy", "top_20_accuracy", "mrr"], 19
    )
    assert found.loss == pytest.approx(float(sum(map(sum, of_batches))) / 19, rel=1e-9)
    for k in (1, 5, 20):
        assert found.means[f"top_{k}_accuracy"] == pytest.approx(np.mean([place <= k for place in places]))
    assert found.means["mrr"] == pytest.approx(np.mean([1 / place for place in places]))
    assert 0 < found.means["top_5_accuracy"] < found.means["top_20_accuracy"] < 1, "the measures must tell models apart"


def test_rows_that_do_not_count_change_no_measure(tmp_path):
    task = task_of(load_run(embedding_settings(tmp_path)))  # the loss is that of batches of 8
    assert isinstance(task, TrainEmbedding)
    model = task.build_model(BuildOptions(ProcessGroupCollection.single(), torch.float64)).eval()
    pairs = task.evaluation_dataset(str(tmp_path / "pairs-24"))
    rows = [*range(3), *range(10, 16)]

    def measured(counted: list[bool], rows: list[int]) -> tuple[dict[str, int], dict[str, float]]:
        batch = task.collate([pairs[row] for row in rows], rows, counted)
        inputs = task.inputs(batch, 0, torch.device("cpu"))
        with torch.no_grad():
            sums = task.sums(task.forward(model, inputs, None), inputs)
        return dict(task.counts(batch)), {name: value.item() for name, value in sums.items()}

    want_counts, want = measured([True] * 8, rows[:1] + rows[2:])
    counts, found = measured([place != 1 for place in range(9)], rows)
    assert counts == want_counts
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("parallel", [{"context": 2}, {"shard": 2}, {"pipeline": 2}, {"tensor": 2}])
def test_held_out_measures_are_the_same_in_every_layout(parallel, tmp_path):
    tree = embedding_settings(tmp_path)
    [want] = ranks(1, evaluation, tree, 1, 23)
    for found in ranks(2, evaluation, {**tree, "parallel": parallel}, 2, 23):
        assert found.means == pytest.approx(want.means, rel=1e-9)
        assert found.counts == want.counts


def inputs_kept(tree: dict[str, Any]) -> list[int]:
    """How many micro-batches' inputs exist whenever embeddings are compared, in two steps and an evaluation."""
    found, joint_sums = [], TrainEmbedding.joint_sums

    def counting(*arguments: Any) -> Any:
        found.append(sum(type(each) is EmbeddingInputs for each in gc.get_objects()))
        return joint_sums(*arguments)

    with patch.object(TrainEmbedding, "joint_sums", counting):
        steps(tree, 1)
        evaluation(tree, 1)
    return found


def test_the_tokens_of_all_micro_batches_are_not_kept_until_they_are_compared(tmp_path):
    assert ranks(1, inputs_kept, embedding_settings(tmp_path)) == [[0, 0, 0]]


def test_a_sample_is_shown_text_by_text(tmp_path):
    task = task_of(load_run(embedding_settings(tmp_path)))
    assert isinstance(task, TrainEmbedding)
    assert isinstance(task, JointTask)
    lines = task.sample_as_text(task.train_dataset()[0])
    assert [line for line in lines if not line.startswith("  ")] == ["query:", "positive:", "negative:", "negative:"]
    assert sum("[CLS]" in line and "[SEP]" in line for line in lines) == 4


def from_text(folder: Path, **data: Any) -> dict[str, Any]:
    """A settings tree for pairs made from the sentences in ``folder``."""
    tree = embedding_settings(folder)
    return {**tree, "data": {"train": str(folder / "text"), "seq_length": tree["data"]["seq_length"], **data}}


def test_pairs_are_made_from_plain_text_too(tmp_path):
    tree = from_text(tmp_path)
    task = task_of(load_run(tree))
    lines = task.sample_as_text(task.train_dataset()[0])
    assert [line for line in lines if not line.startswith("  ")] == ["query:", "positive:"]
    held_out = task.evaluation_dataset(tree["data"]["train"])
    blocks = [sample.texts[1][1:-1].tobytes() for sample in (held_out[number] for number in range(len(held_out)))]
    assert len(held_out) > 10
    assert len(set(blocks)) == len(blocks), "each block once"
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 8}}, 1)
    for found in ranks(2, steps, {**tree, "parallel": {"shard": 2}}, 2):
        assert differences(found, want) == []


@pytest.mark.parametrize("probability", [0.0, None, 1.0])
def test_a_query_stays_in_its_block_as_often_as_is_set(probability, tmp_path):
    task = task_of(load_run(from_text(tmp_path, query_in_block_probability=probability)))
    samples = [task.train_dataset()[number].texts for number in range(400)]
    kept = np.mean([query[1:-1].tobytes() in block.tobytes() for query, block in samples])
    if probability is None:
        assert 0.04 < kept < 0.25  # some sentences occur twice in a block
    else:
        assert abs(kept - probability) < 0.1


def test_settings_that_do_not_apply_to_the_data_are_refused(tmp_path):
    task = task_of(load_run(from_text(tmp_path, num_negatives=1)))
    with pytest.raises(ConfigError, match=r"data.num_negatives \(1\) must be 0 for .*text, which holds text"):
        task.train_dataset()
    tree = embedding_settings(tmp_path, data={"query_in_block_probability": 0.5})
    with pytest.raises(ConfigError, match=r"is for pairs made from text; .*pairs-24 holds pairs; leave it out"):
        task_of(load_run(tree)).train_dataset()


def test_a_model_trained_on_pairs_is_evaluated_on_text_and_the_other_way_round(tmp_path):
    tree = embedding_settings(tmp_path)
    [of_pairs] = ranks(1, evaluation_on, tree, str(tmp_path / "text"))
    tree = from_text(tmp_path, query_in_block_probability=0.5)
    [of_text] = ranks(1, evaluation_on, tree, str(tmp_path / "pairs-24"))
    assert of_pairs.num_tokens > 10
    assert of_text.num_tokens == 24


def evaluation_on(tree: dict[str, Any], prefix: str) -> Evaluation:
    run = build_run(load_run(tree, world_size=1), torch.device("cpu"))
    held_out = run.task.evaluation_dataset(prefix)
    return evaluate(run.task, run.pipeline, held_out, 2, options=run.options, device=run.device)


def test_pairs_made_from_text_are_blended_with_others(tmp_path):
    tree = embedding_settings(tmp_path)
    pairs, text = tree["data"]["train"], str(tmp_path / "text")
    for train in (text, {"text": text, "pairs": pairs}):
        data = {**tree["data"], "train": train, "num_negatives": 0, "query_in_block_probability": 1.0}
        task = task_of(load_run({**tree, "data": data}))
        kinds = {
            np.isin(query[1:-1], block).all() for query, block in (task.train_dataset()[n].texts for n in range(50))
        }
        assert kinds == ({True} if train == text else {True, False})


def test_rows_may_be_longer_than_the_table_of_positions(tmp_path):
    # rows of 32 columns, half of them padding; the longest passage has 6 tokens between two special ones
    tree = embedding_settings(tmp_path, model={"max_position_embeddings": 8})
    [found], [want] = (ranks(1, steps, each, 1) for each in (tree, embedding_settings(tmp_path)))
    assert found.losses == pytest.approx(want.losses, rel=1e-12)
    with pytest.raises(DataError, match=r"must have at most 7 tokens .*\(model.max_position_embeddings\)"):
        task_of(load_run(embedding_settings(tmp_path, model={"max_position_embeddings": 7}))).train_dataset()
    of_text = from_text(tmp_path)
    of_text["model"]["max_position_embeddings"] = 8
    with pytest.raises(ConfigError, match=r"\(8\) must be at least data.seq_length \(32\) .*use data.seq_length=8"):
        task_of(load_run(of_text)).train_dataset()


def test_an_embedding_model_is_trained_on_with_the_head_that_it_has(tmp_path):
    bert = {**FIRST, **PROJECTED}
    tree = embedding_settings(tmp_path, bert, train={"steps": 1})
    ranks(1, run_here, tree, 1)
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"model": {"bert": {"head": "embedding", "similarity_temperature": 0.5}}})
    )
    found = settings_from(tree["run"], tmp_path / "recipe.yaml")
    assert TransformerConfig(**found["model"]).bert == BertConfig(
        **{**tree["model"]["bert"], "similarity_temperature": 0.5}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": {"bert": {"head": "embedding"}}}))
    kept = settings_from(tree["run"], tmp_path / "recipe.yaml")["model"]
    assert TransformerConfig(**kept).bert == BertConfig(**tree["model"]["bert"])
    # and a classifier that starts from it has none of them
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"model": {"bert": {"head": "classification", "num_classes": 2}}})
    )
    assert not bert.keys() & settings_from(tree["run"], tmp_path / "recipe.yaml")["model"]["bert"].keys()


def test_masking_is_refused(tmp_path):
    tree = embedding_settings(tmp_path, data={"masking": {"probability": 0.3}})
    with pytest.raises(ConfigError, match=r"bert.head=embedding masks nothing; leave it out"):
        task_of(load_run(tree))
