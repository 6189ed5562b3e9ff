"""BERT pretraining: losses and accuracies computed from its logits, in every layout, and refusals."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megalith.config import load_run
from megalith.data.bert_dataset import BertSample
from megalith.data.prepare import prepare
from megalith.errors import ConfigError, DataError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.dry_run import describe
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.inference import evaluate_checkpoint
from megalith.training.pretrain import pretrain
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.pretrain_bert import PretrainBert
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings, write_sentences
from tests.tiny_run import write_dataset
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

ALONE = BuildOptions(ProcessGroupCollection.single(), torch.float64)


def task_and_model(tree: dict[str, Any]) -> tuple[PretrainBert, Any]:
    task = task_of(load_run(tree))
    assert isinstance(task, PretrainBert)
    return task, task.build_model(ALONE)


def half_right(model: Any, sample: BertSample) -> BertSample:
    """``sample`` with the model's prediction as every second label of masked tokens: a random model is never right."""
    N = sample.num_tokens
    types = torch.from_numpy(sample.token_types[None, :N])
    with torch.no_grad():
        likeliest = model(torch.from_numpy(sample.tokens[None, :N]), token_types=types).predictions[0].argmax(-1)
    labels, places = sample.labels.copy(), np.flatnonzero(sample.loss_mask)[::2]
    labels[places] = likeliest.numpy()[places]
    return replace(sample, labels=labels)


@pytest.mark.parametrize("binary_head", [True, False])
def test_losses_and_accuracies_are_those_of_the_models_logits(binary_head, tmp_path):
    tree = masked_settings(tmp_path, model={"bert": {"num_token_types": 2, "binary_head": binary_head}})
    task, model = task_and_model(tree)
    dataset = task.train_dataset()
    samples = [half_right(model.eval(), dataset[number]) for number in range(6)]
    batch = task.collate(samples, range(6), [True] * 5 + [False])
    inputs = task.inputs(batch, 0, torch.device("cpu"))
    assert task.sums(task.forward(model.train(), inputs, None), inputs).keys() == task.terms.keys()
    model.eval()
    found = task.sums(task.forward(model, inputs, None), inputs)
    counts = task.counts(batch)
    right = wrong = 0.0
    masked = orders = in_order = 0
    for sample in samples[:5]:  # each separately, without padding
        N = sample.num_tokens
        tokens, types = torch.from_numpy(sample.tokens[None, :N]), torch.from_numpy(sample.token_types[None, :N])
        output = model(tokens, token_types=types)
        at = torch.from_numpy(sample.loss_mask[:N])
        labels = torch.from_numpy(sample.labels[:N])[at]
        wrong += cross_entropy(output.predictions[0][at], labels, reduction="sum").item()
        right += (output.predictions[0][at].argmax(-1) == labels).sum().item()
        masked += len(labels)
        if binary_head:
            in_order += int(output.binary_logits.argmax(-1)) == int(sample.is_swapped)
            orders += cross_entropy(output.binary_logits, torch.tensor([int(sample.is_swapped)])).item()
    assert 0 < right < masked
    assert counts["mlm"] == counts["mlm_accuracy"] == masked
    assert found["mlm"].item() == pytest.approx(wrong, rel=1e-9)
    assert found["mlm_accuracy"].item() == right
    assert ("sop" in found) == ("sop" in counts) == ("sop" in task.terms) == binary_head
    if binary_head:
        assert counts["sop"] == counts["sop_accuracy"] == 5
        assert found["sop"].item() == pytest.approx(orders, rel=1e-9)
        assert found["sop_accuracy"].item() == in_order


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "context 2": (2, {"context": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "shard 2": (2, {"shard": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "replicate 2 x context 2": (4, {"replicate": 2, "context": 2}),
}


# `make test` takes one: tests/training/test_bert_layouts.py has every axis, but for context only gathered keys
IN_MAKE_TEST = ("context 2",)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_learns_the_same(layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = masked_settings(tmp_path)
    alone = {**tree, "train": {**tree["train"], "micro_batch_size": 8}}
    [want] = ranks(1, steps, alone, 1)
    for found in ranks(num_ranks, steps, {**tree, "parallel": parallel}, num_ranks):
        assert differences(found, want) == []


def half_right_samples(tree: dict[str, Any]) -> list[BertSample]:
    run = build_run(load_run(tree), torch.device("cpu"))
    held_out = run.task.evaluation_dataset(tree["data"]["train"])
    return [half_right(run.chunks[0].eval(), held_out[number]) for number in range(7)]


def evaluation(tree: dict[str, Any], world_size: int, samples: list[BertSample]) -> Evaluation:
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    return evaluate(run.task, run.pipeline, samples, 2, options=run.options, device=run.device)


@pytest.mark.parametrize("parallel", [{"tensor": 2, "sequence": True}, {"context": 2}, {"pipeline": 2}, {"shard": 2}])
def test_held_out_accuracy_is_the_same_in_every_layout(parallel, tmp_path):
    tree = masked_settings(tmp_path)
    [samples] = ranks(1, half_right_samples, tree)
    [want] = ranks(1, evaluation, tree, 1, samples)
    assert set(want.means) == {"mlm", "mlm_accuracy", "sop", "sop_accuracy"}
    assert 0.0 < want.means["mlm_accuracy"] < 1.0
    assert 0.0 < want.means["sop_accuracy"] < 1.0
    for found in ranks(2, evaluation, {**tree, "parallel": parallel}, 2, samples):
        assert found.counts == want.counts
        assert found.means == pytest.approx(want.means, rel=1e-9)


def trained(tree: dict[str, Any]) -> list[str]:
    shown: list[str] = []
    pretrain(load_run(tree), shown.append, shown.append)
    return shown


def test_a_run_tells_its_accuracies_and_eval_measures_them_again(tmp_path):
    tree = masked_settings(tmp_path / "train")
    tree["data"]["valid"] = tree["data"]["train"]
    tree["run"] = str(tmp_path / "run")
    [lines] = ranks(1, trained, tree)
    [line] = (line for line in lines if "held-out" in line)
    told = re.search(r"loss (\S+) over .*; mlm_accuracy (\S+), sop (\S+), sop_accuracy (\S+)", line)
    assert told is not None, line
    [found] = evaluate_checkpoint(tmp_path / "run", None, None)
    assert [found.loss, *list(found.means.values())[1:]] == pytest.approx([float(x) for x in told.groups()], abs=1e-3)


def test_eval_on_other_data_needs_only_the_tokenizer_that_the_run_keeps(tmp_path):
    tree = masked_settings(tmp_path / "train")
    tree["run"] = str(tmp_path / "run")
    ranks(1, trained, tree)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    [found] = evaluate_checkpoint(tmp_path / "run", str(tmp_path / "elsewhere" / "text"), None)
    (tmp_path / "elsewhere").rename(tmp_path / "train")
    assert evaluate_checkpoint(tmp_path / "run", str(tmp_path / "train" / "text"), None)[0].loss == found.loss


def write_stories(folder: Path) -> str:
    """Writes documents of four sentences, each with words of its own.

    A quarter of them is held out. Returns the dataset's prefix.
    """
    random, words = np.random.default_rng(0), [("one", "two"), ("red", "green"), ("runs", "sees"), ("house", "tree")]
    folder.mkdir()
    for number in range(200):
        lines = (" ".join(random.choice(pair, random.integers(2, 5))) for pair in words)
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    prepare([folder], folder / "text", vocab_size=397, split_sentences=True, special_tokens=["bert"], valid=0.25)
    return str(folder / "text")


def test_the_order_of_segments_is_learned(tmp_path):
    prefix = write_stories(tmp_path / "stories")
    tree = masked_settings(
        tmp_path / "stories",
        model={"num_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.2},
        data={"valid": f"{prefix}-valid"},
        train={"steps": 40, "global_batch_size": 16, "micro_batch_size": 16},
        optim={"lr": 6e-3},
        precision={"dtype": "float32"},
    )
    ranks(1, trained, tree)
    [found] = evaluate_checkpoint(tree["run"], None, None)
    assert found.means["sop_accuracy"] > 0.9  # chance is one half


def test_the_first_sample_is_shown_with_its_masked_words_in_brackets(tmp_path):
    tree = masked_settings(tmp_path)
    text = describe(load_run(tree), 1)
    assert "with [tokens to predict] in brackets" in text
    shown = text[text.index("  | ") :]
    assert shown.startswith("  | [CLS]")
    assert re.search(r"\[[a-z ]+\]", shown)


def test_data_and_settings_of_another_kind_are_refused(tmp_path):
    tree = masked_settings(tmp_path)
    data, model = tree["data"], tree["model"]
    with pytest.raises(ConfigError, match=r"data.eod_mask_loss is for the rows of a GPT.*leave it out"):
        task_of(load_run({**tree, "data": {**data, "eod_mask_loss": True}}))
    gpt = {name: value for name, value in model.items() if name not in ("bert", "residual")}
    with pytest.raises(ConfigError, match=r"data.masking is for models that predict masked tokens.*leave it out"):
        task_of(load_run({**tree, "model": gpt, "data": {**data, "masking": {"probability": 0.2}}}))
    with pytest.raises(ConfigError, match=r"model.vocab_size \(260\) must be at least the \d+ entries"):
        task_of(load_run({**tree, "model": {**model, "vocab_size": 260}})).train_dataset()
    choices = {**model, "bert": {"num_token_types": 2, "head": "multiple_choice"}}
    with pytest.raises(ConfigError, match=r"no built-in task trains a model.bert with head multi"):
        task_of(load_run({**tree, "model": choices}))
    whole = write_dataset(tmp_path / "whole")
    with pytest.raises(DataError, match=r"--split-sentences|does not record which tokenizer"):
        task_of(load_run({**tree, "data": {**data, "train": whole}})).train_dataset()


def test_long_sentences_can_be_cut(tmp_path):
    prefix = write_sentences(tmp_path)
    tree = masked_settings(tmp_path, data={"train": prefix, "seq_length": 12})
    with pytest.raises(DataError, match=r"data.masking.long_sentences=cut"):
        task_of(load_run(tree)).train_dataset()
    tree["data"]["masking"] = {"long_sentences": "cut", "short_sequence_probability": 0.0}
    task, model = task_and_model(tree)
    assert len(task.evaluation_dataset(prefix)) > 30
    held_out = task.evaluation_dataset(prefix)
    found = evaluate(task, Pipeline([model]), held_out, 4, options=ALONE, device=torch.device("cpu"))
    assert found.num_tokens > 0
