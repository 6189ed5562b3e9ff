"""A classifier: losses and confusion computed from its logits, from pretrained weights, in every layout."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from megalith.cli.evaluate import _losses
from megalith.config import load_run
from megalith.data.labelled import prepare_labelled
from megalith.errors import ConfigError
from megalith.insight.report import write_report
from megalith.observe.metrics import read_metrics
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.inference import load_model
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.finetune_classification import FinetuneClassification
from megalith.training.tasks.origin import settings_from
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

CLASSES = {"colour": ("red", "green"), "number": ("one", "two"), "place": ("house", "river")}


def labelled_settings(folder: Path, **groups: Any) -> dict[str, Any]:
    """A settings tree for a classifier with three classes, over texts in ``folder``."""
    tree = masked_settings(folder, **groups)
    prefix = folder / "labelled"
    if not prefix.with_suffix(".idx").exists():
        random = np.random.default_rng(0)
        names = [name for name in CLASSES for _ in range(9)]
        rows = [f"the {' '.join(random.choice(CLASSES[name], 2))},{name}" for name in names]
        (folder / "x.csv").write_text("\n".join(["text,label", *rows]))
        prepare_labelled(folder / "x.csv", prefix, folder / "text-tokenizer.json")
    tree["data"] = {**tree["data"], "train": str(prefix)}
    tree["model"] = {**tree["model"], "bert": {"num_token_types": 2, "head": "classification", "num_classes": 3}}
    return tree


def test_losses_and_confusion_are_those_of_the_models_logits(tmp_path):
    task = task_of(load_run(labelled_settings(tmp_path)))
    assert isinstance(task, FinetuneClassification)
    model = task.build_model(BuildOptions(ProcessGroupCollection.single(), torch.float64)).eval()
    texts = task.evaluation_dataset(task.config.data.train)
    numbers = range(2, 26, 3)
    batch = task.collate([texts[i] for i in numbers], range(8), [True] * 7 + [False])
    inputs = task.inputs(batch, 0, torch.device("cpu"))
    with torch.no_grad():
        found = task.sums(task.forward(model, inputs, None), inputs)
        logits = [model(torch.from_numpy(texts[i].tokens[None])) for i in numbers[:7]]  # each without its padding
    labels = [texts[i].label for i in numbers[:7]]
    losses = [cross_entropy(row, torch.tensor([label])).item() for row, label in zip(logits, labels, strict=True)]
    taken = [int(row.argmax()) for row in logits]
    counts = task.counts(batch)
    assert counts["classification"] == counts["accuracy"] == 7
    assert found["classification"].item() == pytest.approx(sum(losses), rel=1e-9)
    assert found["accuracy"].item() == sum(a == b for a, b in zip(taken, labels, strict=True))
    for label in range(3):
        for other in range(3):
            name = f"confusion/{label}/{other}"
            assert counts[name] == labels.count(label)
            assert found[name].item() == list(zip(labels, taken, strict=True)).count((label, other))


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size)


@pytest.mark.parametrize(
    ("parallel", "activation"),
    [
        pytest.param({"tensor": 2, "sequence": True}, "tanh", marks=pytest.mark.slow),
        ({"tensor": 2, "sequence": True}, "gelu"),
        ({"context": 2}, "relu"),
        ({"pipeline": 2}, "gelu_tanh"),
        pytest.param({"shard": 2}, "tanh", marks=pytest.mark.slow),
    ],
)
def test_every_layout_learns_the_same(parallel, activation, tmp_path):
    tree = labelled_settings(tmp_path)
    tree["model"]["bert"]["classifier_activation"] = activation
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 8}}, 1)
    for found in ranks(2, steps, {**tree, "parallel": parallel}, 2):
        assert differences(found, want) == []


def evaluation(tree: dict[str, Any], world_size: int) -> Evaluation:
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    texts = run.task.evaluation_dataset(tree["data"]["train"])
    return evaluate(run.task, run.pipeline, texts, 2, options=run.options, device=run.device, max_samples=None)


def test_held_out_accuracy_is_the_same_in_every_layout(tmp_path):
    tree = labelled_settings(tmp_path)
    [want] = ranks(1, evaluation, tree, 1)
    assert sum(want.counts[f"confusion/{label}/0"] for label in range(3)) == want.counts["accuracy"] == 27
    for found in ranks(2, evaluation, {**tree, "parallel": {"context": 2}}, 2):
        assert found.means == pytest.approx(want.means, rel=1e-9)


def trained(tree: dict[str, Any], world_size: int) -> list[str]:
    shown: list[str] = []
    pretrain(preflight(tree, [], world_size), shown.append, shown.append)
    return shown


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}, {"tensor": 2}])
def test_a_pretrained_encoder_is_loaded_without_its_head(parallel, tmp_path):
    pretraining = masked_settings(tmp_path, train={"steps": 1})
    ranks(1, trained, pretraining, 1)
    tree = labelled_settings(tmp_path, train={"steps": 1}, optim={"lr": 1e-30}, model={"init_method_std": 0.5})
    source = {**tree, "run": str(tmp_path / "tuned"), "parallel": parallel}
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(source))
    settings = settings_from(pretraining["run"], tmp_path / "tuned.yaml")
    world_size = 2 if parallel else 1
    lines = ranks(world_size, trained, settings, world_size)[0]
    [told] = (line for line in lines if "the head differs from that of" in line)
    assert "missing: classifier; left out: binary_head, lm_head, lm_transform" in told
    before, after = load_model(tmp_path / "run").model, load_model(tmp_path / "tuned").model
    kept = dict(after.named_parameters())
    assert after.classifier is not None
    assert after.classifier.linear.weight.std().item() == pytest.approx(0.5, rel=0.3)  # 96 weights
    for name, weight in before.named_parameters():
        is_of_the_head = name.startswith(("lm_", "binary_head"))
        assert (name in kept) != is_of_the_head
        if not is_of_the_head:
            torch.testing.assert_close(kept[name], weight, rtol=0.0, atol=1e-27)  # after a step at lr 1e-30


def test_eval_and_the_report_have_the_table_of_confusion(tmp_path):
    tree = labelled_settings(tmp_path, train={"steps": 1})
    tree["data"]["valid"] = tree["data"]["train"]
    [lines] = ranks(1, trained, tree, 1)
    assert any("over 27 texts; accuracy " in line for line in lines)
    [means] = [record["valid"] for record in read_metrics(tmp_path / "run") if "valid" in record]
    measured = _losses(str(tmp_path / "run"), None, None, lambda done, total: None)
    assert "nats over 27 texts, at step 1; accuracy" in measured[0]
    assert measured[1].split() == ["class", "0", "1", "2", "predicted", "as"]
    assert [record["classes"] for record in read_metrics(tmp_path / "run") if "valid" in record] == [[*CLASSES]]
    shares = [[f"{means[f'confusion/{label}/{taken}']:.0%}" for taken in range(3)] for label in range(3)]
    assert [line.split() for line in measured[2:]] == [
        [str(label), name, *row] for (label, name), row in zip(enumerate(CLASSES), shares, strict=True)
    ]
    assert len({line.rindex("%") for line in measured[2:]}) == 1, "columns stand below each other"
    page = write_report(tmp_path / "run").read_text()
    assert "<h2>Confusion" in page
    assert "<h2>Accuracy" in page
    table = page[page.index("<h2>Confusion") :]
    assert all(share in table for row in shares for share in row if share != "0%")
    assert re.findall(r"<th>(\w+)", table) == [*CLASSES, *CLASSES]


def test_settings_of_other_tasks_and_other_classes_are_refused(tmp_path):
    tree = labelled_settings(tmp_path)
    with pytest.raises(ConfigError, match=r"data.masking is for pretraining.*leave it out"):
        task_of(load_run({**tree, "data": {**tree["data"], "masking": {"probability": 0.2}}}))
    bert = {**tree["model"]["bert"], "num_classes": 4}
    # as many classes, but different ones, which class numbers would not reveal
    (tmp_path / "other.csv").write_text("text,label\nthe red,colour\nthe two,number\nthe tree,plant\n")
    prepare_labelled(tmp_path / "other.csv", tmp_path / "other", tmp_path / "text-tokenizer.json")
    with pytest.raises(ConfigError, match=r"must be those of .*: colour, number, place; got .*plant"):
        task_of(load_run(tree)).evaluation_dataset(str(tmp_path / "other"))
    with pytest.raises(
        ConfigError, match=r"num_classes \(4\) must be the number of classes in .*, 3: colour, .*; use 3"
    ):
        task_of(load_run({**tree, "model": {**tree["model"], "bert": bert}})).train_dataset()
