"""A run from a Hugging Face model: the loss and gradients of transformers, the same in every layout."""

import pytest
import torch
from safetensors.torch import load_file

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTDataset
from megalith.models.hf import open_folder, parameter_shapes
from megalith.numerics.tolerance import NOISE_FLOAT32, gradient_error
from megalith.training.preflight import preflight
from megalith.training.tasks.origin import settings_from
from tests.models.hf.peers import as_in_files, saved_buffers
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings, write_dataset
from tests.training.on_ranks import first_steps
from tests.training.outcomes import run_here
from tests.training.reference import differences
from tests.training.tasks.conversion.folders import write_folder

# name: ranks, settings of the layout
LAYOUTS = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2, "sequence": True}),
    "shard 2": (2, {"shard": 2}),
    "context 2": (2, {"context": 2}),
    "shard 4": (4, {"shard": 4}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
}
OF_EXPERTS = {
    "expert 2": (2, {"expert": 2}),
    "expert 2 x tensor 2": (4, {"expert": 2, "tensor": 2, "sequence": True}),
}
FAST = [("gpt2", "tensor 2"), ("gemma3", "context 2"), ("mixtral", "expert 2")]
FAMILIES = ("llama", "tied llama", "mistral", "windowed qwen2", "qwen3", "gemma2", "gemma3", "gpt2")
WITH_EXPERTS = ("mixtral", "qwen2 of experts", "qwen3 of experts", "gpt-oss", "deepseek v3", "deepseek v2")
CASES = [(shape, layout) for shape in FAMILIES for layout in LAYOUTS if layout != "one process"]
CASES += [(shape, layout) for shape in WITH_EXPERTS for layout in OF_EXPERTS]
ROUNDING = 1e-5  # transformers computes norms and rotations of float64 models in float32


def tree_of(folder, **parallel):
    """A run's settings in float64, over the dataset in ``folder``, initialized from the model in ``folder/source``."""
    plain = settings(folder, parallel=parallel, optim={"clip_norm": 1e9})
    tree = settings_from(str(folder / "source"), None)
    return {**plain, "model": tree["model"], "load": tree["load"]}


def transformers_step(theirs, folder):
    """The loss of the first batch and the gradients, under our names."""
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
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()} | saved_buffers(theirs)
    ours = family.from_hf(as_in_files(theirs, gradients), config.model)
    return loss.item(), {name: ours[name] for name in parameter_shapes(config.model)}


def first_step(folder, layout="one process"):
    """The run's first step in ``layout``, as each rank sees it."""
    num_ranks, parallel = (LAYOUTS | OF_EXPERTS)[layout]
    return ranks(num_ranks, first_steps, tree_of(folder, **parallel), num_ranks, 1)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(s, marks=[] if s in ("llama", "gemma3", "gpt2") else [pytest.mark.slow])
        for s in FAMILIES + WITH_EXPERTS
    ],
)
def test_the_first_step_in_one_process_is_that_of_transformers(shape, tmp_path):
    theirs = write_folder(tmp_path / "source", shape, "float64")
    write_dataset(tmp_path / "text")
    [found] = first_step(tmp_path)
    weights = open_folder(tmp_path / "source").weights
    assert found.initial.keys() == weights.tensors.keys()
    assert all(found.initial[name].equal(weights.read(name)) for name in weights.tensors)
    loss, gradients = transformers_step(theirs, tmp_path)
    assert found.losses[0] == pytest.approx(loss, rel=ROUNDING)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for name, gradient in gradients.items():
        assert gradient_error(found.gradients[0][name], gradient, norm, NOISE_FLOAT32) < ROUNDING, name


@pytest.mark.parametrize(
    ("shape", "layout"), [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]
)
def test_every_rank_reads_its_part_and_the_first_step_is_that_of_one_process(shape, layout, tmp_path):
    write_folder(tmp_path / "source", shape, "float64")
    write_dataset(tmp_path / "text")
    [want] = first_step(tmp_path)
    for found in first_step(tmp_path, layout):
        assert differences(found, want) == []


def test_narrow_weights_are_widened_to_what_the_run_trains_in(tmp_path):
    write_folder(tmp_path / "source", "gpt2", "bfloat16")
    write_dataset(tmp_path / "text")
    [found] = first_step(tmp_path)
    stored = load_file(tmp_path / "source" / "model.safetensors")["transformer.wte.weight"]
    assert found.initial["model.embed_tokens.weight"].equal(stored.double())


def test_a_setting_that_computes_something_else_and_data_of_an_unknown_tokenizer_are_told(tmp_path, caplog):
    write_folder(tmp_path / "source", "llama")
    write_dataset(tmp_path / "text")
    tree = tree_of(tmp_path)
    preflight(tree, ["model.rope.base=500"], 1)
    said = [record.getMessage() for record in caplog.records]
    assert f"the model differs from that of {tmp_path}/source/config.json: rope.base 10000.0 -> 500.0" in said
    assert f"{tmp_path}/text does not record which tokenizer made it; it must be that of {tmp_path}/source" in said


def test_a_setting_that_differs_from_the_run_whose_weights_are_loaded_is_told(tmp_path, caplog):
    write_dataset(tmp_path / "text")
    ranks(1, run_here, settings(tmp_path, train={"steps": 1}), 1)
    load = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    overrides = ["model.rope.base=500", "model.init_method_std=0.5", f"load={load}", f"run={tmp_path}/other"]
    preflight(settings(tmp_path), overrides, 1)
    said = [record.getMessage() for record in caplog.records]
    assert f"the model differs from that of {tmp_path}/run/config.yaml: rope.base 10000.0 -> 500.0" in said
    caplog.clear()
    preflight(settings(tmp_path), [f"load={load}", f"run={tmp_path}/other"], 1)
    assert not any("differs" in record.getMessage() for record in caplog.records)
