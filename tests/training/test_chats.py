"""Supervised fine-tuning: only answers count, and a conversation is computed as if it were alone, in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config import RunConfig, load_run
from megalith.data.chat.dataset import ChatDataset
from megalith.errors import ConfigError, DataError
from megalith.models.gpt_model import GPTModel
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.training.inference import evaluate_checkpoint
from megalith.training.planned_data import planned_data
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.conversation_settings import check_settings_of_conversations
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.transformer.step_record import MicroBatchRecord, StepRecord
from tests.data.chat.examples import conversations, write_conversations
from tests.rank_pool import RankError, ranks
from tests.tiny_masked import masked_settings
from tests.tiny_run import GPT2, SEQ, settings, write_dataset
from tests.training.on_ranks import first_steps
from tests.training.outcomes import losses, run_here
from tests.training.reference import differences, reference

GPT2_WITHOUT_DROPOUT = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None, "hidden_dropout": 0.0}
GPT2_WITHOUT_DROPOUT |= {"attention_dropout": 0.0}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {"micro_batch_size": 8}),
    "context 2 x shard 2": (4, {"context": 2, "shard": 2}, {"micro_batch_size": 1}),
    "context 2, heads traded": (2, {"context": 2, "context_method": "all_to_all"}, {}),
    "pipeline 2 x tensor 2, sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True}, {}),
    "replicate 2, recompute": (2, {"replicate": 2, "shard": 1}, {"recompute": "full"}),
}
SLOW = ("one rank", "context 2, heads traded", "replicate 2, recompute")


def chat_settings(folder: Path, **groups: Any) -> dict[str, Any]:
    prefix = folder / "chats"
    if not prefix.with_suffix(".idx").exists():
        write_conversations(prefix, 80)
    return settings(
        folder, **{**groups, "data": {"train": str(prefix), "eod_mask_loss": False, **groups.get("data", {})}}
    )


MOE = {
    "moe": {"num_experts": 4, "router": {"sequence_balance": 0.1, "z_loss": 0.01}},
    "ffn_hidden_size": 48,
}
MOE_LAYOUTS = [
    (2, {"context": 2}),
    pytest.param(4, {"expert": 2, "tensor": 2, "sequence": True, "shard": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "parallel"), MOE_LAYOUTS)
def test_padding_does_not_count_for_experts_in_any_layout(world_size, parallel, tmp_path):
    tree = chat_settings(tmp_path, model=MOE)
    [alone] = ranks(1, first_steps, tree, 1)  # in the same micro-batches, on which the z-loss depends with padding
    for rank, found in enumerate(ranks(world_size, first_steps, {**tree, "parallel": parallel}, world_size)):
        assert differences(found, alone) == [], f"on rank {rank}"


def test_experts_are_counted_for_the_tokens_of_conversations_alone(tmp_path):
    config = load_run(chat_settings(tmp_path, model=MOE))
    task, rows = task_of(config), range(4)
    samples = [chats_of(config)[row] for row in rows]
    num_tokens = [sample.num_tokens for sample in samples]
    assert min(num_tokens) < config.data.seq_length
    for sample in samples:  # what follows the last conversation
        assert not sample.tokens[sample.num_tokens :].any()
        assert sample.documents[-1] == sample.documents[sample.num_tokens - 1] + (
            sample.num_tokens < len(sample.tokens)
        )
    record = StepRecord(1.0)
    inputs = task.with_record(task.inputs(task.collate(samples, rows), 0, torch.device("cpu")), record.micro_batch(0))
    model = GPTModel(config.model, seed=1)
    task.forward(model, inputs, None)
    for layer in range(config.model.num_layers):
        assert record.tokens_per_expert(layer).sum() == 2 * sum(num_tokens)


def chats_of(config: RunConfig) -> ChatDataset:
    return ChatDataset(config.data.train, config.data.seq_length, config.train.seed)


def in_step(config: RunConfig, dataset: ChatDataset, step: int) -> list[tuple[list[int], list[bool]]]:
    """The conversations in the rows of a step, looked up in the file; these have the learned tokens."""
    learned = {tuple(tokens): mask for tokens, mask in conversations(config.data.train)}
    G, found = config.train.global_batch_size, []
    for sample in (dataset[step * G + row] for row in range(G)):
        for number in range(sample.documents[-1] + 1):
            own = sample.documents == number
            if sample.labels[own].any():
                tokens = (*sample.tokens[own].tolist(), int(sample.labels[own][-1]))
                found.append((list(tokens), learned[tokens]))
    return found


def loss_of_each_alone(
    model: GPTModel, config: RunConfig, dataset: ChatDataset, step: int, record: MicroBatchRecord
) -> Tensor:
    """The mean over all learned tokens of the step; one forward for each conversation, without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, learned in in_step(config, dataset, step):
        row, mask = torch.tensor([tokens]), torch.tensor(learned[1:])
        total = total + model(row[:, :-1], labels=row[:, 1:])[0][mask].sum()
        count += int(mask.sum())
    return total / count


@pytest.mark.parametrize("model", [{}, GPT2_WITHOUT_DROPOUT], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LAYOUTS])
def test_every_layout_learns_each_conversation_as_if_it_were_alone(name, model, tmp_path):
    world_size, parallel, train = LAYOUTS[name]
    tree = chat_settings(tmp_path, model=model, parallel=parallel, train=train)
    single = {key: group for key, group in tree.items() if key != "parallel"}
    alone = reference(single, samples=chats_of(load_run(single)), loss_of=loss_of_each_alone)
    for rank, found in enumerate(ranks(world_size, first_steps, tree, world_size)):
        assert differences(found, alone) == [], f"on rank {rank}"


def test_a_run_continues_in_another_layout_and_evaluates_answers_only(tmp_path):
    held_out = write_conversations(tmp_path / "held-out", 23, seed=1)
    train = {"steps": 6, "evaluation": {"every": 6}}
    whole = chat_settings(tmp_path, train=train, data={"valid": held_out})
    ranks(1, run_here, whole, 1)
    split = {**whole, "run": str(tmp_path / "split"), "parallel": {"context": 2}}
    ranks(2, run_here, {**split, "train": {**split["train"], "steps": 3}}, 2)
    ranks(2, run_here, {**split, "parallel": {"shard": 2}, "train": {**split["train"], "micro_batch_size": 4}}, 2)
    np.testing.assert_allclose(losses(split["run"]), losses(whole["run"]), rtol=LAYOUT_FLOAT64)
    num_answers = sum(sum(learned[1:]) for _, learned in conversations(held_out))
    [found] = ranks(1, evaluated, whole["run"], held_out)
    assert found.num_tokens == num_answers
    [other] = ranks(1, evaluated, split["run"], held_out)
    assert found.loss == pytest.approx(other.loss, rel=LAYOUT_FLOAT64)
    longer = write_conversations(tmp_path / "longer", 23, longest=40, seed=1)
    fitting = [learned for _, learned in conversations(longer) if len(learned) <= SEQ + 1]
    assert 0 < len(fitting) < 23
    assert ranks(1, evaluated, split["run"], longer)[0].num_tokens == sum(sum(learned[1:]) for learned in fitting)


def test_the_start_says_how_many_epochs_the_steps_are(tmp_path):
    dataset = chats_of(load_run(chat_settings(tmp_path)))
    assert planned_data(dataset, 3 * dataset.num_samples) == [
        f"training data         {3 * dataset.num_samples} rows of conversations in total, 3 epochs"
    ]
    [line] = planned_data(dataset, 5 * dataset.num_samples)
    assert line.endswith("5 epochs, more than the 4 that are nearly as good as new text (arXiv:2305.16264)")


def test_what_is_held_out_is_packed_alike_whatever_the_seed(tmp_path):
    prefix = write_conversations(tmp_path / "held-out", 30, seed=1)
    trees = (chat_settings(tmp_path, train={"seed": seed}) for seed in (1, 2))
    one, other = (task_of(load_run(tree)).evaluation_dataset(prefix) for tree in trees)
    assert all((one[n].tokens == other[n].tokens).all() for n in range(len(one)))


def test_texts_of_a_blend_with_conversations_may_be_filled_in_the_middle(tmp_path):
    texts = write_dataset(tmp_path / "texts")
    chats = write_conversations(tmp_path / "chats")
    data = {"train": {"texts": texts, "chats": chats}, "fill_in_the_middle": {"rate": 0.5}}
    check_settings_of_conversations(load_run(settings(tmp_path, data=data)).data)


def evaluated(run: str, prefix: str) -> Any:
    [found] = evaluate_checkpoint(run, prefix, None)
    return found


def test_a_run_does_not_continue_on_other_conversations(tmp_path):
    tree = chat_settings(tmp_path, train={"steps": 1})
    ranks(1, run_here, tree, 1)
    other = {**tree["data"], "train": write_conversations(tmp_path / "other", 80, seed=3)}
    with pytest.raises(RankError, match="the training data have changed: text"):
        ranks(1, run_here, {**tree, "train": {**tree["train"], "steps": 2}, "data": other}, 1)


def test_rows_of_texts_and_of_conversations_may_share_a_batch(tmp_path):
    text = write_dataset(tmp_path / "text")
    for setting in (False, True):
        resets = {"reset_attention_mask": setting, "reset_position_ids": False, "valid": text}
        task = PretrainGPT(load_run(chat_settings(tmp_path, data=resets)))
        chats, texts = task.train_dataset(), task.evaluation_dataset(text)
        batch = task.collate([texts[0], chats[0], texts[1]], [0, 1, 2])
        inputs = task.inputs(batch, 0, torch.device("cpu"))
        alone = task.inputs(task.collate([texts[0], texts[1]], [0, 1]), 0, torch.device("cpu"))
        assert (alone.packed_seq_params is not None) == setting
        of_texts = [[(0, 16)]] * 2 if alone.packed_seq_params is None else alone.packed_seq_params.rows()
        _, lengths = np.unique(chats[0].documents, return_counts=True)
        ends = np.cumsum(lengths).tolist()
        of_chats = list(zip([0, *ends], ends, strict=False))
        assert inputs.packed_seq_params.rows() == [of_texts[0], of_chats, of_texts[1]]
        assert inputs.position_ids[1].tolist() == [n for length in lengths for n in range(length)]
        assert inputs.position_ids[0].tolist() == inputs.position_ids[2].tolist() == list(range(16))


def test_tokens_further_ahead_are_learned_in_the_same_conversation_only(tmp_path):
    config = load_run(chat_settings(tmp_path, model={"mtp": {"num_modules": 2}}))
    task, G = task_of(config), config.train.global_batch_size
    dataset = task.train_dataset()
    counts = task.counts(task.collate([dataset[row] for row in range(G)], range(G)))
    learned = [mask for _, mask in in_step(config, dataset, 0)]
    assert counts == {
        "lm": sum(sum(mask[1:]) for mask in learned),
        "mtp_1": sum(sum(mask[2:]) for mask in learned),
        "mtp_2": sum(sum(mask[3:]) for mask in learned),
    }


def test_a_blend_of_conversations_and_texts_is_the_same_in_every_layout(tmp_path):
    train = {"chats": write_conversations(tmp_path / "chats", 80), "text": write_dataset(tmp_path / "text")}
    blend = {"train": train, "weights": {"chats": 0.5, "text": 0.5}, "long_conversations": "skip"}
    tree = chat_settings(tmp_path, data=blend)
    ranks(1, run_here, tree, 1)
    other = {**tree, "run": str(tmp_path / "other"), "parallel": {"context": 2, "shard": 2}}
    ranks(4, run_here, other, 4)
    np.testing.assert_allclose(losses(other["run"]), losses(tree["run"]), rtol=LAYOUT_FLOAT64)


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ({"seq_length": 8}, DataError, r"must have at most 9 tokens.*use data.seq_length=\d+"),
        (
            {"fill_in_the_middle": {"rate": 0.5}},
            ConfigError,
            r"fill_in_the_middle reorders texts, but data.train holds .*leave",
        ),
        ({"eod_mask_loss": True}, ConfigError, r"data.eod_mask_loss has no effect on conversations, .*; leave it out"),
        ({"reset_position_ids": True}, ConfigError, r"data.reset_position_ids has no effect on conversations"),
    ],
)
def test_data_and_settings_that_do_not_go_together_are_refused(data, error, says, tmp_path):
    with pytest.raises(error, match=says):
        task_of(load_run(chat_settings(tmp_path, data=data))).train_dataset()


def test_a_treatment_of_long_conversations_needs_conversations(tmp_path):
    chats, text = write_conversations(tmp_path / "chats"), write_dataset(tmp_path / "text")
    skip = {"train": text, "long_conversations": "skip", "eod_mask_loss": False}
    with pytest.raises(ConfigError, match=r"data.long_conversations \(skip\) has no effect, because no dataset"):
        task_of(load_run(settings(tmp_path, data={**skip, "valid": text}))).train_dataset()
    task = task_of(load_run(settings(tmp_path, data={**skip, "seq_length": 8, "valid": {"a": text, "b": chats}})))
    task.train_dataset()
    assert 0 < len(task.evaluation_dataset(chats)) < len(conversations(chats))
    with pytest.raises(ConfigError, match=r"data.long_conversations is for the rows of a GPT"):
        task_of(load_run(masked_settings(tmp_path / "bert", data={"long_conversations": "cut"})))
