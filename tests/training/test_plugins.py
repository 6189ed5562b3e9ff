"""The seams: what is plugged in from outside trains in every layout to the numbers of one process."""

from typing import Any

import pytest

from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training import plugins
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS = [{"tensor": 2, "sequence": True}, {"shard": 2}, {"tensor": 2, "shard": 2}]
# what is plugged in, and the settings over those of a tiny Llama
PLUGINS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a second layer with another feed-forward": ({"task": plugins.OtherSecondLayer}, DROPS),
    "a model that reads padded rows both ways": ({"task": plugins.ReadBothWays}, DROPS),
    "a matrix product of 8 bits": ({"matrix_product": plugins.product_of_8_bits}, {}),
    "a matrix product of 8 bits, tied embeddings": (
        {"matrix_product": plugins.product_of_8_bits},
        {"tie_word_embeddings": True, "add_bias_linear": True},
    ),
    "a loss of two terms": ({"task": plugins.TwoTerms}, DROPS),
    "a third optimizer": ({"optimizer_of": plugins.build_adagrad}, {}),
}


def alone(tree: dict[str, Any], parts: dict[str, Any]) -> Trajectory:
    [found] = ranks(1, first_steps, tree, 1, **parts)
    return found


@pytest.mark.parametrize("name", PLUGINS)
def test_it_trains_in_three_layouts_to_the_numbers_of_one_process(name, tmp_path):
    parts, model = PLUGINS[name]
    tree = settings(tmp_path, model=model, train={"micro_batch_size": 1})
    want = alone({**tree, "train": {**tree["train"], "micro_batch_size": 8}}, parts)
    for parallel in LAYOUTS:
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
