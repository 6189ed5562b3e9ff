"""User-written extensions train in every layout to the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTDataset
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.observe.metrics import read_metrics
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.inference import evaluate_checkpoint
from megalith.training.pretrain import pretrain
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import Task
from tests.rank_pool import ranks
from tests.storage.memory_store import MemoryStore, SharedBytes
from tests.tiny_run import EOD, SEQ, settings
from tests.training import plugins
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences
from tests.transformer.shapes import config

DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS = [{"tensor": 2, "sequence": True}, {"shard": 2}, {"tensor": 2, "shard": 2}]
# what is plugged in, and the settings to add to those of a tiny Llama
PLUGINS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a second layer with another feed-forward": ({"task": plugins.OtherSecondLayer}, {}),
    "a model that reads padded rows both ways": ({"task": plugins.ReadBothWays}, DROPS),
    "a matrix product of 8 bits": ({"matrix_product": plugins.product_of_8_bits}, {}),
    "a matrix product of 8 bits, tied embeddings": (
        {"matrix_product": plugins.product_of_8_bits},
        {"tie_word_embeddings": True, "add_bias_linear": True},
    ),
    "a loss of two terms": ({"task": plugins.TwoTerms}, DROPS),
    "a third optimizer": ({"optimizer_of": plugins.build_adagrad}, {}),
}


def alone(tree: dict[str, Any], parts: dict[str, Any], num_steps: int = 2) -> Trajectory:
    [found] = ranks(1, first_steps, tree, 1, num_steps, **parts)
    return found


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param(name, parallel, marks=() if number % 3 == at and "tied" not in name else pytest.mark.slow)
        for number, name in enumerate(PLUGINS)
        for at, parallel in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_it_trains_in_three_layouts_to_the_numbers_of_one_process(name, parallel, tmp_path):
    parts, model = PLUGINS[name]
    tree = settings(tmp_path, model=model, train={"micro_batch_size": 1})
    want = alone({**tree, "train": {**tree["train"], "micro_batch_size": 8}}, parts)
    num_ranks = parallel.get("tensor", 1) * parallel.get("shard", 1)
    for found in ranks(num_ranks, first_steps, {**tree, "parallel": parallel}, num_ranks, **parts):
        assert differences(found, want) == []


@pytest.mark.parametrize("name", PLUGINS)
def test_it_is_not_what_the_house_does_without_it(name, tmp_path):
    parts, model = PLUGINS[name]
    tree = settings(tmp_path, model=model)
    plain, found = alone(tree, {"task": PretrainGPT}), alone(tree, parts)
    same_start = found.initial.keys() == plain.initial.keys() and found.losses[0] == plain.losses[0]
    assert not same_start or found.losses[1] != plain.losses[1]


def checkpointed_in_memory(tree: dict[str, Any], world_size: int) -> tuple[list[str], list[float]]:
    """What a run of two steps that continues to four has saved, and the losses of all four."""
    store = MemoryStore(SharedBytes(f"{tree['run']} {world_size}"), "memory://run/checkpoints")
    losses: list[float] = []
    for steps in (2, 4):
        train = {**tree["train"], "steps": steps}
        run_config = load_run({**tree, "train": train}, world_size=world_size)
        pretrain(run_config, str, str, RunParts(checkpoints=store))
    if torch.distributed.get_rank() == 0:
        losses = [record["loss"] for record in read_metrics(Path(tree["run"]))]
    return store.names(), losses


def test_a_store_in_memory_checkpoints_and_resumes_in_three_layouts(tmp_path):
    tree = settings(tmp_path, model=DROPS)
    want = alone(tree, {"task": PretrainGPT}, num_steps=4).losses
    for parallel in LAYOUTS:
        num_ranks = parallel.get("tensor", 1) * parallel.get("shard", 1)
        moved = {**tree, "parallel": parallel, "run": str(tmp_path / f"run-{len(parallel)}-{num_ranks}")}
        for names, losses in ranks(num_ranks, checkpointed_in_memory, moved, num_ranks):
            assert names == ["latest", "step-00000002", "step-00000004"]
            assert losses in ([], pytest.approx(want, rel=LAYOUT_FLOAT64))
        assert not (Path(moved["run"]) / "checkpoints").exists()


class Undivided(PretrainGPT):
    """A task whose rows cannot be split."""

    context_part = Task.context_part


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        first_steps(tree, 2, task=Undivided)
    return str(error.value)


def test_a_task_whose_rows_cannot_be_split_is_refused(tmp_path):
    for message in ranks(2, refusal, settings(tmp_path, parallel={"context": 2})):
        assert message.startswith("Undivided does not split rows over ranks, but parallel.context is 2; set")


def test_a_dropout_of_a_users_layer_drops_where_the_settings_drop_nothing():
    model = GPTModel(config(hidden_dropout=0.0, attention_dropout=0.0), spec_of=plugins.OtherSecondLayer.spec_of)
    tokens = torch.arange(16).view(2, 8)
    first, second = model(tokens), model(tokens)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def two_terms_by_autograd(tree: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The first loss and gradients of ``lm.mean() + 0.25 * (l ** 2).mean()``."""
    run_config = load_run(tree)
    model = GPTModel(run_config.model, BuildOptions(ProcessGroupCollection.single(), torch.float64))
    dataset = GPTDataset(run_config.data.train, SEQ, run_config.train.seed)
    samples = [dataset[row] for row in range(run_config.train.global_batch_size)]
    tokens, labels = (torch.tensor([list(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
    losses = model(tokens, labels=labels)
    loss = losses[tokens != EOD].mean() + 0.25 * losses.square().mean()
    loss.backward()
    return [loss.item()], {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_loss_of_two_terms_is_its_formula(tmp_path):
    tree = settings(tmp_path, optim={"clip_norm": 0.0})
    [loss], gradients = two_terms_by_autograd(tree)
    for num_ranks in (1, 2):
        moved = {**tree, "parallel": {"shard": num_ranks}}
        found = ranks(num_ranks, first_steps, moved, num_ranks, 1, task=plugins.TwoTerms)
        assert found[0].losses == [pytest.approx(loss, rel=LAYOUT_FLOAT64)]
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[0].gradients[0][name], gradient, rtol=1e-9, atol=1e-12)


def evaluated(tree: dict[str, Any]) -> tuple[float, float]:
    """The last held-out loss of a run with a custom model, and the result of evaluating its checkpoint."""
    run_config = load_run(tree)
    task = plugins.ReadBothWays(run_config)
    pretrain(run_config, str, str, RunParts(task))
    held_out = [record["valid_loss"] for record in read_metrics(Path(tree["run"])) if "valid_loss" in record]
    return held_out[-1], evaluate_checkpoint(tree["run"], None, None, task=task)[0].loss


def test_a_run_of_a_users_own_model_is_evaluated_from_its_checkpoint(tmp_path):
    tree = settings(tmp_path, model=DROPS, train={"steps": 2})
    tree["data"]["valid"] = tree["data"]["train"]
    [(held_out, again)] = ranks(1, evaluated, tree)
    assert again == pytest.approx(held_out, rel=LAYOUT_FLOAT64)
