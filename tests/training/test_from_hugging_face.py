"""A run from a model of Hugging Face: in every layout the loss and gradients that transformers computes for it."""

import pytest
import torch
from safetensors.torch import load_file

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTDataset
from megalith.models.hf import open_folder
from megalith.numerics.tolerance import LAYOUT_FLOAT64, gradient_error
from megalith.training.origin import settings_from
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings, write_dataset
from tests.training.conversion.folders import write_folder
from tests.training.on_ranks import first_steps

# name: ranks, settings of the layout
LAYOUTS = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2, "sequence": True}),
    "shard 2": (2, {"shard": 2}),
    "context 2": (2, {"context": 2}),
    "shard 4": (4, {"shard": 4}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
}
FAST = {("gpt2", "tensor 2"), ("tied llama", "one process")}
CASES = [(shape, layout) for shape in ("llama", "tied llama", "gpt2") for layout in LAYOUTS]


def tree_of(folder, **parallel):
    """A run's settings over the dataset in ``folder``, from the model in ``folder/source``, in float64."""
    plain = settings(folder, parallel=parallel, optim={"clip_norm": None, "schedule": "constant"})
    tree = settings_from(str(folder / "source"), None)
    return {**plain, "model": tree["model"], "load": tree["load"]}


def transformers_step(theirs, folder):
    """The loss of the first batch and the gradients, by our names."""
    config = load_run(tree_of(folder))
    dataset = GPTDataset(config.data.train, SEQ, config.train.seed)
    samples = [dataset[row] for row in range(config.train.global_batch_size)]
    tokens, labels = (torch.tensor([list(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
    counted = tokens != 0  # eod_mask_loss
    losses = torch.nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(labels)
    loss = losses[counted].sum() / counted.sum()
    loss.backward()
    family = open_folder(folder / "source").family
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    return loss.item(), family.from_hf(gradients, config.model)


@pytest.mark.parametrize(
    ("shape", "layout"), [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]
)
def test_every_rank_reads_its_part_and_the_first_step_is_that_of_transformers(shape, layout, tmp_path):
    theirs = write_folder(tmp_path / "source", shape, "float64")
    write_dataset(tmp_path / "text")
    num_ranks, parallel = LAYOUTS[layout]
    want, gradients = transformers_step(theirs, tmp_path)
    for found in ranks(num_ranks, first_steps, tree_of(tmp_path, **parallel), num_ranks, 1):
        assert found.losses[0] == pytest.approx(want, rel=LAYOUT_FLOAT64)
        weights = open_folder(tmp_path / "source").weights
        assert found.initial.keys() == weights.tensors.keys()
        assert all(found.initial[name].equal(weights.read(name)) for name in weights.tensors)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        for name, gradient in gradients.items():
            assert gradient_error(found.gradients[0][name], gradient, norm) < LAYOUT_FLOAT64, name


def test_narrow_weights_are_widened_to_what_the_run_trains_in(tmp_path):
    write_folder(tmp_path / "source", "gpt2", "bfloat16")
    write_dataset(tmp_path / "text")
    [found] = ranks(1, first_steps, tree_of(tmp_path), 1, 1)
    stored = load_file(tmp_path / "source" / "model.safetensors")["transformer.wte.weight"]
    assert found.initial["model.embed_tokens.weight"].equal(stored.double())
