"""Held-out loss: every token once, the same in any layout."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.data.gpt_dataset import EvaluationDataset, GPTSample
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.observe.metrics import read_metrics
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.inference import evaluate_checkpoint, load_model
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from megalith.training.setup import build_run
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.program import write_settings
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.tiny_run import EOD, VOCAB, settings


def evaluation(tree: dict[str, Any], world_size: int, max_samples: int | None) -> Evaluation:
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    return evaluate(
        run.task,
        run.pipeline,
        EvaluationDataset(tree["data"]["train"], tree["data"]["seq_length"]),
        2,
        options=run.options,
        device=run.device,
        max_samples=max_samples,
    )


def by_hand(tree: dict[str, Any]) -> tuple[float, int]:
    """The mean loss over windows of S tokens in file order, by torch's own loss."""
    run = build_run(load_run(tree), torch.device("cpu"))
    tokens = torch.from_numpy(IndexedDataset(tree["data"]["train"]).tokens.astype("int64"))
    total, S = 0.0, tree["data"]["seq_length"]
    model = run.chunks[0].eval()
    for start in range(0, len(tokens) - 1, S):
        window = tokens[start : start + S + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1), len(tokens) - 1


def test_it_is_the_mean_over_every_token_but_the_first(tmp_path):
    tree = settings(tmp_path)
    [(want, count)] = ranks(1, by_hand, tree)
    [found] = ranks(1, evaluation, tree, 1, None)
    assert found.num_tokens == count
    assert found.loss == pytest.approx(want, rel=1e-12)


OVER = [
    (2, {"shard": 2}),
    (2, {"tensor": 2, "sequence": True}),
    (4, {"replicate": 2}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}),
    (4, {"tensor": 4}),  # two ranks share a query group
    (4, {"context": 2, "shard": 2}),
]


@pytest.mark.parametrize(("max_samples", "over"), sampled([*product((None, 5, 1), OVER)]))
def test_it_is_the_same_in_every_layout(max_samples, over, tmp_path):
    world_size, parallel = over
    tree = settings(tmp_path, model={"num_query_groups": 2, "num_layers": 4})
    [want] = ranks(1, evaluation, tree, 1, max_samples)
    for found in ranks(world_size, evaluation, {**tree, "parallel": parallel}, world_size, max_samples):
        assert found.num_tokens == want.num_tokens
        assert found.loss == pytest.approx(want.loss, rel=1e-12)


def test_a_few_samples_are_spread_over_the_whole_file(tmp_path):
    seen: list[int] = []

    class Watched(EvaluationDataset):
        def __getitem__(self, index: int) -> GPTSample:
            seen.append(index)
            return super().__getitem__(index)

    tree = settings(tmp_path)
    config = load_run(tree)
    watched = Watched(tree["data"]["train"], tree["data"]["seq_length"])
    alone = {"options": BuildOptions(ProcessGroupCollection.single()), "device": torch.device("cpu")}
    evaluate(PretrainGPT(config), Pipeline([GPTModel(config.model)]), watched, 2, max_samples=4, **alone)
    assert seen == [number * len(watched) // 4 for number in range(4)]


def train(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree, world_size=2), str, str)


def lines_of(tree: dict[str, Any]) -> list[str]:
    shown: list[str] = []
    pretrain(load_run(tree), shown.append, shown.append)
    return shown


def test_held_out_text_without_a_loss_is_told_and_ends_no_run(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "ends", "uint16") as builder:
        builder.add_document([EOD, EOD, EOD])
        builder.finalize(vocab_size=VOCAB, eod=EOD)
    tree = settings(tmp_path, data={"valid": str(tmp_path / "ends")}, train={"steps": 2})
    [shown] = ranks(1, lines_of, tree)
    assert "step 2  held-out loss not measured: none of the tokens read from data.valid has a loss" in shown
    assert not any("valid_loss" in record for record in read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()


def test_a_checkpoint_of_two_ranks_is_evaluated_by_one_process(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 3})
    ranks(2, train, tree)
    [found] = evaluate_checkpoint(tree["run"], tree["data"]["train"], None)
    trained = load_model(Path(tree["run"]))
    assert found.step == trained.step == 3
    assert next(trained.model.parameters()).dtype == torch.float64
    assert 3.0 < found.loss < 4.2
    assert found.perplexity == pytest.approx(2.718281828459045**found.loss)


def test_a_run_is_found_by_its_url_too(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 1})
    ranks(2, train, tree)
    want = evaluate_checkpoint(tree["run"], tree["data"]["train"], 2)
    assert evaluate_checkpoint(f"file://{tree['run']}", tree["data"]["train"], 2) == want
    loaded = {**tree, "run": str(tmp_path / "next"), "load": f"file://{tree['run']}/checkpoints/step-00000001"}
    assert preflight(write_settings(loaded, tmp_path), [], 2).load == loaded["load"]
    with pytest.raises(ConfigError, match=r"is neither a complete checkpoint nor .*; give load=file://.*step-00000001"):
        preflight(write_settings({**loaded, "load": f"file://{tree['run']}"}, tmp_path), [], 2)
