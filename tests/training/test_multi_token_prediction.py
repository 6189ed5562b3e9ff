"""Multi-token prediction in a run: the same in every layout, with separate documents and loss terms; caught faults."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTBatch, GPTSample, with_labels_ahead
from megalith.models.gpt_model import GPTDecoder
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.observe.metrics import read_metrics
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks import pretrain_gpt
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.rank_pool import ranks, renew_ranks
from tests.tiny_run import EOD, GPT2, settings
from tests.training import test_traffic as traffic
from tests.training.on_ranks import first_steps
from tests.training.outcomes import run_here
from tests.training.reference import Trajectory, differences, reference
from tests.training.test_layouts import LAYOUTS

MTP = {"num_modules": 2, "loss_weight": 0.3}
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
# beyond tests/training/test_model_options.py: what interacts in the last stage, in split rows, in a layer
IN_LAYOUTS = [
    "context 4, packed, selective",
    "pipeline 2 x tensor 2 x context 2, zb_v, sequence, packed",
    "tensor 2, sequence, packed, recompute",
    "pipeline 2, interleaved, five layers",
    "pipeline 2, zero bubble, five layers, recompute",
    "pipeline 2, zb_v, five layers",
    "pipeline 2 x replicate 2, selective",
    "pipeline 2 x tensor 2 x shard 2, sequence, packed",
    "hybrid 2 x 2",
    "context 2, heads traded, packed, recompute",
    "tensor 2 x context 2, sequence, packed",
]
# on two ranks: rows that are split, and modules in their own stage
QUICK = {("context 2, heads traded, packed, recompute", "untied"), ("pipeline 2, zb_v, five layers", "tied")}
MODELS = {"untied": DROPS, "tied": {**GPT2, "ffn_hidden_size": None}}
TRAFFIC = [
    "pipeline 2, zb_v, five layers",
    "tensor 2, sequence, packed, recompute",
    "tensor 2",
    "tensor 2 x shard 2, selective",
    "context 2, heads traded, packed, recompute",
    "pipeline 2 x shard 2, interleaved",
    "pipeline 2 x tensor 2, sequence",
]
IN_MAKE_TEST = TRAFFIC[1:2]


def sample(names: list[str], quick: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


def tree_of(folder: Path, name: str, model: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    num_ranks, groups = LAYOUTS[name]
    return num_ranks, settings(folder, **{**groups, "model": {**model, **groups.get("model", {}), "mtp": MTP}})


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[] if (name, model) in QUICK else [pytest.mark.slow])
        for name in IN_LAYOUTS
        for model in MODELS
    ],
)
def test_every_layout_learns_what_one_process_does(name, model, tmp_path):
    num_ranks, tree = tree_of(tmp_path, name, MODELS[model])
    want = reference({key: group for key, group in tree.items() if key != "parallel"})
    for rank, found in enumerate(ranks(num_ranks, first_steps, tree, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    [(1, {}), pytest.param(2, {"tensor": 2, "sequence": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_loss_fused_with_the_projection_learns_the_same(num_ranks, parallel, tmp_path):
    tree = settings(tmp_path, model={"mtp": MTP}, train={"fused_linear_cross_entropy": True})
    want = reference(tree)
    for found in ranks(num_ranks, first_steps, {**tree, "parallel": parallel}, num_ranks):
        assert differences(found, want) == []


@pytest.fixture
def new_ranks() -> None:
    renew_ranks()  # as tests/training/test_traffic.py does


@pytest.mark.usefixtures("new_ranks")
@pytest.mark.parametrize("name", sample(TRAFFIC, IN_MAKE_TEST))
def test_ranks_exchange_what_is_counted(name, tmp_path):
    num_ranks, tree = tree_of(tmp_path, name, {})
    traffic.check(tree, num_ranks)


def sample_of(*documents: list[int]) -> GPTSample:
    """Documents of tokens, each with an end, and the first token of the following one."""
    stretch = np.concatenate([[*tokens, EOD] for tokens in documents] + [[1]])
    numbers = np.concatenate([np.full(len(tokens) + 1, i, dtype=np.int32) for i, tokens in enumerate(documents)])
    return GPTSample(stretch[:-1], stretch[1:], stretch[:-1] != EOD, numbers, len(numbers))


def losses_of(task: PretrainGPT, sample: GPTSample) -> tuple[Tensor, Tensor]:
    """The loss of each label [1+M, S], and which of them count."""
    model = task.build_model(BuildOptions(ProcessGroupCollection.single(), torch.float64))
    inputs = task.inputs(task.collate([sample], [0]), 0, torch.device("cpu"))
    return task.forward(model, inputs, None)[:, 0], inputs.loss_mask[:, 0]


FIRST, OTHER_FIRST = [5, 9, 2, 7, 4, 8], [6, 3, 3, 1, 9, 5]
SECOND, OTHER_SECOND = [11, 12, 13, 14, 15, 16, 17, 18], [28, 27, 26, 25, 24, 23, 22, 21]


def test_changing_a_document_leaves_the_losses_of_the_other_bitwise(tmp_path):
    config = load_run(settings(tmp_path, model={"mtp": MTP}, data=PACKED))
    task, border = PretrainGPT(config), len(FIRST) + 1
    before, counts = losses_of(task, sample_of(FIRST, SECOND))
    after, _ = losses_of(task, sample_of(OTHER_FIRST, SECOND))
    assert counts[:, border:].sum() == 8 + 7 + 6
    assert torch.equal(after[:, border:][counts[:, border:]], before[:, border:][counts[:, border:]])
    assert not torch.equal(after[:, :border], before[:, :border])
    after, _ = losses_of(task, sample_of(FIRST, OTHER_SECOND))
    assert counts[:, :border].sum() == 6 + 5 + 4
    assert torch.equal(after[:, :border][counts[:, :border]], before[:, :border][counts[:, :border]])
    assert not torch.equal(after[:, border:], before[:, border:])


def roll_across_documents() -> Any:
    def of_whole_rows(batch: GPTBatch, num_ahead: int) -> GPTBatch:
        one = with_labels_ahead(replace(batch, documents=np.zeros_like(batch.documents)), num_ahead)
        return replace(one, documents=batch.documents)

    return patch.object(pretrain_gpt, "with_labels_ahead", of_whole_rows)


def take_the_count_of_the_main_term() -> Any:
    counts = PretrainGPT.counts

    def of_lm(self: PretrainGPT, batch: GPTBatch) -> Mapping[str, int]:
        return dict.fromkeys(self.terms, counts(self, batch)["lm"])

    return patch.object(PretrainGPT, "counts", of_lm)


def give_every_module_the_hidden_states_of_the_model() -> Any:
    def apart(self: GPTDecoder, x: Tensor, tokens: Tensor, context: Any) -> Any:
        yield x
        for name, ahead in zip(self.ahead, tokens, strict=True):
            yield self.layers[name](self.embed_tokens(ahead), x, context)

    return patch.object(GPTDecoder, "predict_ahead", apart)


def roll_each_ranks_part_of_a_row() -> Any:
    collate, context_part = PretrainGPT.collate, PretrainGPT.context_part

    def first_label(self: PretrainGPT, *samples: Any) -> GPTBatch:
        batch = collate(self, *samples)
        return replace(batch, labels=batch.labels[0], loss_mask=batch.loss_mask[0])

    def rolled(self: PretrainGPT, batch: GPTBatch, rank: int, size: int) -> GPTBatch:
        part = context_part(self, batch, rank, size)
        documents = part.documents[:, part.positions]
        return replace(with_labels_ahead(replace(part, documents=documents), 2), documents=part.documents)

    return patch.multiple(PretrainGPT, collate=first_label, context_part=rolled)


# fault: the layout that it breaks
FAULTS: dict[Callable[[], Any], dict[str, Any]] = {
    roll_across_documents: {},
    take_the_count_of_the_main_term: {},
    give_every_module_the_hidden_states_of_the_model: {},
    roll_each_ranks_part_of_a_row: {"context": 2},
}


def first_steps_with(fault: Callable[[], Any], tree: dict[str, Any], num_ranks: int) -> Trajectory:
    with fault():
        return first_steps(tree, num_ranks)


@pytest.fixture(scope="module")
def tree_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trajectory]:
    tree = settings(tmp_path_factory.mktemp("faults"), model={"mtp": MTP}, data=PACKED)
    return tree, reference(tree)


@pytest.mark.parametrize("parallel", [{}, pytest.param({"context": 2}, marks=pytest.mark.slow)], ids=str)
def test_without_a_fault_nothing_is_found(parallel, tree_and_reference):
    tree, want = tree_and_reference
    num_ranks = parallel.get("context", 1)
    for found in ranks(num_ranks, first_steps_with, nullcontext, {**tree, "parallel": parallel}, num_ranks):
        assert differences(found, want) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught(fault, tree_and_reference):
    tree, want = tree_and_reference
    num_ranks = FAULTS[fault].get("context", 1)
    for found in ranks(num_ranks, first_steps_with, fault, {**tree, "parallel": FAULTS[fault]}, num_ranks):
        assert differences(found, want)


def test_held_out_loss_is_that_of_the_next_token_and_the_terms_stand_apart(tmp_path):
    tree = settings(tmp_path, model={"mtp": MTP}, train={"steps": 1, "evaluation": {"every": 1}})
    tree["data"]["valid"] = tree["data"]["train"]
    ranks(1, run_here, tree, 1)
    step, held_out = read_metrics(tmp_path / "run")
    terms = step["terms"]
    assert terms.keys() == held_out["valid"].keys() == {"lm", "mtp_1", "mtp_2"}
    assert step["loss"] == pytest.approx(terms["lm"] + 0.15 * (terms["mtp_1"] + terms["mtp_2"]), rel=LAYOUT_FLOAT64)
    assert held_out["valid_loss"] == held_out["valid"]["lm"]
    assert len(set(held_out["valid"].values())) == 3
