"""A classifier: losses and confusion computed from its logits, from pretrained weights, in every layout."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from megalith.cli.evaluate import _losses
from megalith.config import load_run
from megalith.data.labelled import prepare_labelled
from megalith.errors import ConfigError
from megalith.insight.report import write_report
from megalith.observe.metrics import read_metrics
from megalith.parallel.build_options import BuildOptions
from megalith.topology.agreement import all_gather
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.inference import evaluate_checkpoint, load_model
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from megalith.training.resume import resume_or_load
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.finetune_classification import FinetuneClassification
from megalith.training.tasks.origin import settings_from
from tests.program import here
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

CLASSES = {"colour": ("red", "green"), "number": ("one", "two"), "place": ("house", "river")}
POOLING = ("classifier_pooling", "classifier_activation")
POOLED = ("pooler.dense", "classifier.linear")


def labelled_settings(folder: Path, **groups: Any) -> dict[str, Any]:
    """A settings tree for a classifier with three classes, over texts in ``folder``."""
    tree = masked_settings(folder, **groups)
    prefix = folder / "labelled"
    if not prefix.with_suffix(".idx").exists():
        random = np.random.default_rng(0)
        names = [name for name in CLASSES for _ in range(9)]
        # up to 24 tokens: ranks of cp each have some of a text
        rows = [f"the {' '.join(random.choice(CLASSES[name], random.integers(2, 10)))},{name}" for name in names]
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


def other_classes(tree: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings with training data of the classes ``names``, in this order, and with a model of as many."""
    folder = Path(tree["data"]["train"]).parent
    prefix = folder / "-".join(names)
    if not prefix.with_suffix(".idx").exists():
        rows = [f"the {word},{name}" for name in names for word in ("red", "tree", "river")]
        (folder / "other.csv").write_text("\n".join(["text,label", *rows]))
        prepare_labelled(folder / "other.csv", prefix, folder / "text-tokenizer.json", classes=names)
    bert = {**tree["model"]["bert"], "num_classes": len(names)}
    return {
        **tree,
        "data": {**tree["data"], "train": str(prefix)},
        "model": {**tree["model"], "bert": bert},
        "run": str(folder / "other"),
    }


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size)


@pytest.mark.parametrize(
    ("parallel", "pooling", "activation"),
    [
        pytest.param({"tensor": 2, "sequence": True}, "first", "tanh", marks=pytest.mark.slow),
        ({"tensor": 2, "sequence": True}, "mean", "gelu"),
        pytest.param({"context": 2}, "first", "relu", marks=pytest.mark.slow),
        ({"context": 2}, "mean", "relu"),
        ({"pipeline": 2}, "first", "gelu_tanh"),
        pytest.param({"pipeline": 2}, "mean", "tanh", marks=pytest.mark.slow),
        pytest.param({"shard": 2}, "mean", "tanh", marks=pytest.mark.slow),
    ],
)
def test_every_layout_learns_the_same(parallel, pooling, activation, tmp_path):
    tree = labelled_settings(tmp_path)
    tree["model"]["bert"] |= {"classifier_pooling": pooling, "classifier_activation": activation}
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


@pytest.mark.parametrize(
    ("trained_on", "wanted", "found"),
    [
        ({"binary_head": True}, {"classifier_pooling": "mean", "classifier_activation": "relu"}, ("first", "tanh")),
        ({"binary_head": False}, {"classifier_pooling": "mean", "classifier_activation": "relu"}, ("mean", "relu")),
        ({"classifier_pooling": "mean", "classifier_activation": "gelu"}, {}, ("mean", "gelu")),
        ({"classifier_pooling": "mean"}, {"classifier_pooling": "first"}, ("mean", "tanh")),
    ],
)
def test_a_pooler_that_was_trained_keeps_what_it_reads(trained_on, wanted, found, tmp_path, caplog):
    make = masked_settings if "binary_head" in trained_on else labelled_settings
    source = make(tmp_path, train={"steps": 1})
    source["model"] = {**source["model"], "bert": {**source["model"]["bert"], **trained_on}}
    ranks(1, trained, source, 1)
    tree = labelled_settings(tmp_path)
    tree["model"]["bert"] |= wanted
    (tmp_path / "wanted.yaml").write_text(yaml.safe_dump(tree))
    read = load_run(settings_from(source["run"], tmp_path / "wanted.yaml")).model.bert
    assert read is not None
    assert (read.classifier_pooling, read.classifier_activation) == found
    is_told = found != tuple(wanted.get(name, value) for name, value in zip(POOLING, found, strict=True))
    assert ("model.bert.classifier_pooling is " in caplog.text) == is_told
    (tmp_path / "wanted.yaml").write_text(yaml.safe_dump({"model": {"bert": {"head": "pretraining"}}}))
    assert "classifier_pooling" not in settings_from(source["run"], tmp_path / "wanted.yaml")["model"]["bert"]


def beginning(tree: dict[str, Any], world_size: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What a run says before its first step, and the weights of its pooler and classifier, from all ranks."""
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    lines, weights = resume_or_load(run).lines, dict[str, torch.Tensor]()
    mine = {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        for name, weight in run.weights().items()
        if name.startswith(("pooler", "classifier"))
    }
    for found in all_gather(mine):
        weights |= found
    return lines, weights


@pytest.mark.parametrize(
    ("names", "parallel", "is_new"),
    [
        (("colour", "place"), {}, True),
        (("colour", "place"), {"tensor": 2}, True),
        (("colour", "place"), {"pipeline": 2}, True),
        (("a", "m", "z"), {"pipeline": 2}, True),
        (("place", "number", "colour"), {"shard": 2}, True),
        (tuple(CLASSES), {"pipeline": 2}, False),
    ],
)
def test_a_classifier_of_other_classes_gives_its_encoder_and_the_classifier_is_new(names, parallel, is_new, tmp_path):
    tree = labelled_settings(tmp_path, train={"steps": 1}, optim={"lr": 0.1})
    ranks(1, trained, tree, 1)
    tree = {**other_classes(tree, names), "parallel": parallel, "train": {**tree["train"], "seed": 7}}
    num_ranks = 2 if parallel else 1
    [(_, from_seed), *_] = ranks(num_ranks, beginning, tree, num_ranks)
    before = load_model(tmp_path / "run").model.state_dict()
    load = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    for lines, found in ranks(num_ranks, beginning, {**tree, "load": load}, num_ranks):
        assert {*found} == {f"{module}.{part}" for module in POOLED for part in ("weight", "bias")}
        for name, weight in found.items():
            is_seeds = is_new and name.startswith("classifier")
            assert torch.equal(weight, from_seed[name]) == is_seeds
            assert torch.equal(weight, before[name]) != is_seeds
        told = "(for other classes (colour, number, place): classifier); what is missing or for other classes is init"
        assert len(lines) == 1 + is_new
        assert not is_new or f"the head differs from that of {load} {told}ialized from the seed" in lines[1]


def test_the_classes_of_a_hugging_face_folder_and_of_its_import_are_compared_too(tmp_path):
    tree = labelled_settings(tmp_path, train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, trained, tree, 1)
    export_model(tmp_path / "run", tmp_path / "hf", with_proof=False)
    import_model(tmp_path / "hf", tmp_path / "imported", with_proof=False)
    before = load_model(tmp_path / "run").model.state_dict()["classifier.linear.weight"]
    imported = str(tmp_path / "imported" / "checkpoints" / "step-00000000")
    described = tmp_path / "hf" / "config.json"
    for load in (str(tmp_path / "hf"), imported):
        for names in (tuple(CLASSES), ("place", "number", "colour"), ("a", "z")):
            [(lines, found)] = ranks(1, beginning, {**other_classes(tree, names), "load": load}, 1)
            is_same = names == tuple(CLASSES)
            assert torch.equal(found["classifier.linear.weight"], before) == is_same
            assert ["for other classes (colour, number, place): classifier" in line for line in lines[1:]] == (
                [] if is_same else [True]
            )
    unnamed = {str(number): f"LABEL_{number}" for number in range(3)}
    described.write_text(json.dumps(json.loads(described.read_text()) | {"id2label": unnamed}))
    load = str(tmp_path / "hf")
    [(lines, found)] = ranks(1, beginning, {**other_classes(tree, ("a", "m", "z")), "load": load}, 1)
    assert torch.equal(found["classifier.linear.weight"], before)
    assert lines[1] == (
        f"the classifier of {load} is used for the classes of the training data (a, m, z); they cannot be compared, "
        "because not both have names"
    )
    [(lines, found)] = ranks(1, beginning, {**other_classes(tree, ("a", "z")), "load": load}, 1)
    assert found["classifier.linear.weight"].shape[0] == 2
    assert "(for other classes: classifier)" in lines[1]


def test_evaluation_compares_with_the_classes_in_the_checkpoint(tmp_path):
    tree = labelled_settings(tmp_path, train={"steps": 1})
    ranks(1, trained, tree, 1)
    swapped = other_classes(tree, ("place", "number", "colour"))["data"]["train"]
    same = other_classes(tree, tuple(CLASSES))["data"]["train"]
    classes = tmp_path / "labelled-classes.json"
    for change in (
        lambda: None,
        lambda: classes.write_bytes(Path(f"{swapped}-classes.json").read_bytes()),
        classes.unlink,
    ):
        change()
        with pytest.raises(
            ConfigError,
            match=r"must be those of .*step-00000001, in the same order: colour, number, place; got place, number, "
            r"colour, which differ from class 0 on; label the texts again: megalith data label FILE --classes-of .*run",
        ):
            evaluate_checkpoint(tmp_path / "run", swapped, None)
        [found] = evaluate_checkpoint(tmp_path / "run", same, None)
        assert found.classes == tuple(CLASSES)
    with pytest.raises(ConfigError, match=r"must be those of .*: colour, number, place; got a, z, which differ"):
        evaluate_checkpoint(tmp_path / "run", other_classes(tree, ("a", "z"))["data"]["train"], None)


def test_texts_are_labelled_with_the_classes_of_a_trained_classifier_in_its_order(tmp_path):
    tree = other_classes(labelled_settings(tmp_path, train={"steps": 1}), ("place", "number", "colour"))
    ranks(1, trained, tree, 1)
    export_model(tree["run"], tmp_path / "hf", with_proof=False)
    (tmp_path / "more.csv").write_text("text,label\nthe red,colour\none tree,place")
    rest = ["--tokenizer", tmp_path / "text-tokenizer.json"]
    for number, source in enumerate((tree["run"], f"{tree['run']}/checkpoints/step-00000001", tmp_path / "hf")):
        out = tmp_path / f"more-{number}"
        found = here("data", "label", tmp_path / "more.csv", "--classes-of", source, "--out", out, *rest)
        assert found.code == 0, found
        assert "3: place, number, colour" in found.out
        assert evaluate_checkpoint(tree["run"], str(out), None)[0].num_tokens == 2
    described = tmp_path / "hf" / "config.json"
    unnamed = {str(number): f"LABEL_{number}" for number in range(3)}
    described.write_text(json.dumps(json.loads(described.read_text()) | {"id2label": unnamed}))
    asked = ["--classes-of", tmp_path / "hf", "--out", tmp_path / "x", *rest]
    found = here("data", "label", tmp_path / "more.csv", *asked)
    assert (found.code, "has no class names; leave out --classes-of" in found.err) == (2, True)


def test_eval_and_the_report_show_the_confusion_matrix(tmp_path):
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


def test_a_class_without_held_out_texts_has_dashes_in_the_confusion_matrix(tmp_path):
    tree = labelled_settings(tmp_path, train={"steps": 1})
    (tmp_path / "few.csv").write_text("text,label\nthe one two,number\nthe house river,place\n")
    classes = prepare_labelled(tmp_path / "x.csv", tmp_path / "y", tmp_path / "text-tokenizer.json").classes
    prepare_labelled(tmp_path / "few.csv", tmp_path / "few", tmp_path / "text-tokenizer.json", classes=classes)
    tree["data"]["valid"] = str(tmp_path / "few")
    ranks(1, trained, tree, 1)
    measured = _losses(str(tmp_path / "run"), None, None, lambda done, total: None)
    shares = [line.split()[2:] for line in measured[2:]]
    assert [line.split()[:2] for line in measured[2:]] == [[str(label), name] for label, name in enumerate(CLASSES)]
    assert shares[0] == ["-"] * 3
    assert [sum(float(share.rstrip("%")) for share in shares[label]) for label in (1, 2)] == [100, 100]
    page = write_report(tmp_path / "run").read_text()
    table = page[page.index("<h2>Confusion") :]
    assert table.count("<td>-") == 3
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


def test_classes_that_cannot_be_compared_are_told(tmp_path, caplog):
    tree = labelled_settings(tmp_path)
    prefix = tree["data"]["train"]
    tree["data"]["train"] = str(tmp_path / "text")  # has no labels
    task = task_of(load_run(tree))
    assert task.evaluation_dataset(prefix).classes == tuple(sorted(CLASSES))
    assert f"the classes of {prefix} cannot be compared with the model's, which have no names" in caplog.text
