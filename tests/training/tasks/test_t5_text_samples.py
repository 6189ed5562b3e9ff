"""Samples of a T5 in training match ``megalith generate`` from the checkpoint of that step, in every layout."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalith.models.sampling import Sampling
from megalith.training.tasks.generation import TextGenerator
from tests.rank_pool import ranks
from tests.training.tasks.test_pretrain_t5 import t5_settings
from tests.training.tasks.test_text_samples import lines_of, texts_of

PROMPTS = ["<extra_id_0>", "Once there were <extra_id_0> each had a <extra_id_1>", "no gap"]


def writing(folder: Path, prompts: list[str]) -> dict[str, Any]:
    tree = t5_settings(folder)
    tree["train"] |= {"steps": 3, "generation": {"every": 2, "prompts": prompts, "max_new_tokens": 12}}
    return tree | {"checkpoint": {"every": 2}, "optim": {**tree["optim"], "lr": 0.05}}


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        {"pipeline": 2},
        pytest.param({"pipeline": 2, "shard": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_that_generate_draws_from_the_checkpoint(tmp_path, parallel):
    tree = writing(tmp_path, PROMPTS) | {"parallel": parallel}
    world_size = prod(parallel.values())
    lines, *_ = ranks(world_size, lines_of, tree, world_size)
    found = texts_of(tree["run"])
    assert list(found) == [2, 3]
    for step, samples in found.items():
        generator = TextGenerator.load(f"{tree['run']}/checkpoints/step-{step:08d}")
        drawn = generator.generate(PROMPTS, 12, sampling=Sampling(0.8), seeds=[0, 0, 0], special_tokens=True)
        assert samples == [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, drawn, strict=True)]
        for prompt in PROMPTS:
            assert any(line.startswith(f"step {step}  text after {prompt!r}:\n  | ") for line in lines)
    assert len({sample["text"] for samples in found.values() for sample in samples}) > 1  # they are not empty
