"""Every family, read from its folder in any layout, computes what transformers does: float32, gloo ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from megalith.config import load_run
from megalith.data.gpt_dataset import GPTDataset
from megalith.models.hf import open_folder, parameter_shapes
from megalith.numerics.tolerance import NOISE_FLOAT32, gradient_error
from megalith.parallel.parameters import declared_parameters
from megalith.training.resume import resume_or_load
from megalith.training.setup import build_run
from megalith.training.step import local_counts, sum_totals, train_step
from megalith.training.tasks.origin import settings_from
from tests.models.hf.peers import as_in_files, saved_buffers
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings, write_dataset
from tests.training.tasks.conversion.folders import SHAPES, write_folder

ROWS = 8
# name: ranks, settings of the layout
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2, "sequence": True}),  # experts need both
    "shard 4": (4, {"shard": 4}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
    "context 2": (2, {"context": 2}),
}
IN_MAKE_TEST = [
    ("gpt2", "tensor 2"),
    ("llama", "one process"),
    ("qwen3", "pipeline 2 x tensor 2"),
    ("gemma3", "context 2"),
]
CASES = [
    pytest.param(shape, layout, marks=[] if (shape, layout) in IN_MAKE_TEST else [pytest.mark.slow])
    for shape in SHAPES
    for layout in LAYOUTS
    if shape != "untied gpt2" or "tensor" not in layout  # 37 inner features, which 2 ranks cannot split
]
LOGITS = 1e-5  # absolute
GRADIENTS = 1e-4  # relative to the norm of each


class Part(NamedTuple):
    """What a rank has: logits [B, S/cp, V] of some rows and columns, and all unsharded gradients of its stage."""

    logits: list[tuple[Tensor, Tensor, Tensor]]  # row numbers [B], columns [S/cp], logits
    gradients: dict[str, Tensor]
    loss: float


def on_a_rank(tree: Mapping[str, Any], world_size: int) -> Part:
    run = build_run(load_run(dict(tree), world_size=world_size), torch.device("cpu"))
    resume_or_load(run)
    batches = run.loader.batch(0, ROWS, run.config.train.micro_batch_size)
    logits: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(model: Any, index: int, hidden: Tensor | None) -> Tensor:
        inputs = run.task.inputs(batches[index], 0, run.device)
        output: Tensor = model(inputs.tokens, position_ids=inputs.position_ids, hidden=hidden)
        if run.pipeline.holds_output(model):
            logits.append((torch.tensor(batches[index].row_ids), torch.tensor(batches[index].positions), output))
        return output

    with run.pipeline.evaluating():
        run.pipeline.evaluate(len(batches), forward, lambda index: run.task.hidden_shape(batches[index], run.options))
    gradients: dict[str, Tensor] = {}
    update = run.optimizer.step

    def recording_step() -> None:
        for name, parameter, _ in declared_parameters(*run.chunks):
            gradient = parameter.grad
            gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        update()

    run.optimizer.step = recording_step
    result = train_step(run, batches, sum_totals(run, local_counts(run, batches), stop=False).counts)
    return Part([tuple(part.detach() for part in each) for each in logits], gradients, result.loss)


def transformers_part(theirs: PreTrainedModel, folder: Path, tree: dict[str, Any]) -> Part:
    """Logits of all rows, and the gradients under our names."""
    config = load_run(tree)
    dataset = GPTDataset(config.data.train, SEQ, config.train.seed)
    samples = [dataset[row] for row in range(ROWS)]
    tokens, labels = (torch.tensor([list(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
    logits = theirs(tokens).logits
    counted = tokens.flatten() != 0  # eod_mask_loss
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1)[counted], labels.flatten()[counted])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()} | saved_buffers(theirs)
    by_our_names = open_folder(folder).family.from_hf(as_in_files(theirs, gradients), config.model)
    ours = {name: by_our_names[name] for name in parameter_shapes(config.model)}  # without buffers
    return Part([(torch.arange(ROWS), torch.arange(SEQ), logits.detach())], ours, loss.item())


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_logits_and_gradients_in_a_layout_are_those_of_transformers(shape, layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    theirs = write_folder(tmp_path / "source", shape, "float32")
    write_dataset(tmp_path / "text")
    plain = settings(tmp_path, parallel=parallel, optim={"clip_norm": 1e9}, precision={"dtype": "float32"})
    from_folder = settings_from(str(tmp_path / "source"), None)
    tree = {**plain, "model": from_folder["model"], "load": from_folder["load"]}
    want = transformers_part(theirs, tmp_path / "source", tree)
    found = ranks(num_ranks, on_a_rank, tree, num_ranks)
    [(_, _, logits)], seen = want.logits, torch.zeros(ROWS, SEQ, dtype=torch.bool)
    for rows, columns, got in (each for part in found for each in part.logits):
        torch.testing.assert_close(got, logits[rows][:, columns], rtol=0, atol=LOGITS)
        seen[rows.unsqueeze(1), columns] = True
    assert seen.all()
    norm = torch.stack([gradient.norm() for gradient in want.gradients.values()]).norm().item()
    names = set()
    for part in found:
        assert part.loss == pytest.approx(want.loss, rel=1e-6)
        for name, got in part.gradients.items():
            assert gradient_error(got, want.gradients[name], norm, NOISE_FLOAT32) < GRADIENTS, name
            names.add(name)
    assert names == want.gradients.keys()
