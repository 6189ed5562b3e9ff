"""Samples in training match ``megalith generate`` from the checkpoint of that step, in every layout."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalith.config import load_run
from megalith.data.prepare import prepare
from megalith.errors import ConfigError
from megalith.models.sampling import Sampling
from megalith.observe.metrics import read_metrics
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from megalith.training.setup import RunParts
from megalith.training.tasks.generation import TextGenerator
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import Task
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, LLAMA, settings

PROMPTS = ["Once", "The ships were many, and", "über "]
STEPS = [2, 3]  # every second step, and the last
POSITIONS = 26  # even: sequence parallelism over two ranks can use all of them


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Writes a dataset with its tokenizer; returns its prefix."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "ships.txt").write_text("Once there were many ships, and each had a name.\n" * 40)
    prepare([folder / "ships.txt"], folder / "text", vocab_size=270)
    return folder / "text"


def run_settings(text: Path, folder: Path, shape: dict[str, Any], **generation: Any) -> dict[str, Any]:
    model = {**shape, "vocab_size": 275, "hidden_dropout": 0.0, "attention_dropout": 0.0}  # more than the tokenizer has
    if shape is GPT2:
        model["max_position_embeddings"] = POSITIONS
    tree = settings(folder, data={"train": str(text), "eod_mask_loss": False}, model=model)
    tree["train"] |= {"steps": 3, "generation": {"every": 2, "prompts": PROMPTS, "max_new_tokens": 12, **generation}}
    return tree | {"checkpoint": {"every": 2}, "optim": {**tree["optim"], "lr": 0.05}}


def lines_of(tree: dict[str, Any], world_size: int) -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.models.generation.FIRST_ROOM", 3)  # memory grows twice within a text
        pretrain(load_run(tree, world_size=world_size), lines.append, str)
    return lines


def texts_of(run: str) -> dict[int, list[dict[str, str]]]:
    return {record["step"]: record["samples"] for record in read_metrics(Path(run)) if "samples" in record}


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        (LLAMA, {}),
        (LLAMA, {"tensor": 2, "sequence": True}),
        (GPT2, {"shard": 2}),
        pytest.param(GPT2, {"pipeline": 2}, marks=pytest.mark.slow),
        ({**LLAMA, "num_layers": 4, "tie_word_embeddings": True}, {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}),
        pytest.param(LLAMA, {"pipeline": 2, "tensor": 2, "sequence": True, "shard": 2}, marks=pytest.mark.slow),
        (LLAMA, {"context": 2}),
        pytest.param(LLAMA, {"context": 2, "tensor": 2, "sequence": True}, marks=pytest.mark.slow),
        pytest.param(GPT2, {"tensor": 2, "sequence": True, "shard": 2}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"tensor": 2, "replicate": 2}, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_that_generate_draws_from_the_checkpoint(text, tmp_path, shape, parallel):
    tree = run_settings(text, tmp_path, shape) | {"parallel": parallel}
    degrees = ("tensor", "context", "pipeline", "replicate", "shard")
    world_size = prod(parallel.get(name, 1) for name in degrees)
    lines, *_ = ranks(world_size, lines_of, tree, world_size)
    found = texts_of(tree["run"])
    assert list(found) == STEPS
    for step, samples in found.items():
        generator = TextGenerator.load(f"{tree['run']}/checkpoints/step-{step:08d}")
        drawn = generator.generate(PROMPTS, 12, sampling=Sampling(0.8), seeds=[0, 0, 0])
        assert samples == [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, drawn, strict=True)]
        for prompt in PROMPTS:
            assert any(line.startswith(f"step {step}  text after {prompt!r}:\n  | ") for line in lines)
    assert len({sample["text"] for samples in found.values() for sample in samples}) > 1  # they are not empty
    assert all(letter.isprintable() or letter == "\n" for line in lines for letter in line), "escaped for a terminal"


def test_weights_are_the_same_with_and_without_texts(text, tmp_path):
    with_texts = run_settings(text, tmp_path / "with", LLAMA)
    without = run_settings(text, tmp_path / "without", LLAMA)
    del without["train"]["generation"]
    for tree in (with_texts, without):
        ranks(2, lines_of, tree | {"parallel": {"shard": 2}}, 2)
    losses = [
        [record["loss"] for record in read_metrics(Path(tree["run"])) if "loss" in record]
        for tree in (with_texts, without)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("shape", "prompts", "message"),
    [
        (
            GPT2,
            ["Once " * 30],
            r"train.generation: the prompt 'Once Once .* must be shorter than the model's 26 positions; got .* tokens",
        ),
        (
            LLAMA,
            [],
            r"train.generation.prompts must have at least 1 entry; .*use train.generation.prompts=\[Once upon a",
        ),
        (LLAMA, [""], r"train.generation.prompts\[0\] must not be empty"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(text, tmp_path, shape, prompts, message):
    source = write_settings(run_settings(text, tmp_path, shape, prompts=prompts), tmp_path)
    with pytest.raises(ConfigError, match=message):
        preflight(str(source), [], 1)


# a micro-batch has 2 x 16 tokens, 16 per rank if two share it; "x" is one token
@pytest.mark.parametrize(
    ("parallel", "num_prompts", "message"),
    [
        ({}, 32, None),
        ({}, 33, r"has room for 32 tokens per rank .* 33 prompts padded to 1 tokens need 33 per rank; use fewer"),
        # each of 12 new tokens reads everything again, 13 with the prompt, padded to a multiple of 4
        ({"context": 2}, 2, None),
        ({"context": 2}, 3, r"has room for 16 tokens per rank .* 3 prompts padded to 16 tokens need 24 per rank"),
    ],
)
def test_prompts_that_symmetric_memory_has_no_room_for_are_refused(text, tmp_path, parallel, num_prompts, message):
    tree = run_settings(text, tmp_path, LLAMA, prompts=["x"] * num_prompts)
    tree["model"]["moe"] = {"num_experts": 4}
    tree["experimental"] = ["symmetric_memory"]
    tree["parallel"] = {"expert": 2, "dispatch": {"method": "symmetric"}, **parallel}
    source = write_settings(tree, tmp_path)
    if message is None:
        preflight(str(source), [], 2)
        return
    with pytest.raises(ConfigError, match=message):
        preflight(str(source), [], 2)


def test_data_without_a_tokenizer_are_refused(tmp_path):
    tree = settings(tmp_path)
    tree["train"]["generation"] = {"every": 2, "prompts": ["Once"]}
    ended = here("train", write_settings(tree, tmp_path))
    assert ended.code == 2
    assert "train.generation: " in ended.err
    assert "does not record which tokenizer made it; give data.tokenizer=PATH" in ended.err
    assert not Path(tree["run"]).exists()


class WritesNothing(PretrainGPT):
    text_writer = Task.text_writer


def refused(tree: dict[str, Any]) -> str:
    config = load_run(tree)
    with pytest.raises(ConfigError) as refusal:
        pretrain(config, str, str, RunParts(WritesNothing(config)))
    return str(refusal.value)


def test_a_task_that_writes_no_text_refuses_before_the_first_step(text, tmp_path):
    tree = run_settings(text, tmp_path, LLAMA)
    [message] = ranks(1, refused, tree)
    assert "WritesNothing does not generate text; leave train.generation out" in message
    assert read_metrics(Path(tree["run"])) == []
