"""Checks that a mixture of experts learns more than a dense model with as many active parameters: recipe moe-tiny.

    python -m benchmarks.moe_tiny FOLDER [SEED ...]

For each seed both models see the same tokens of the demo's corpus in the same number of steps, on this machine:

    experts   recipe moe-tiny on 4 ranks, EP 2 x DP 2; the last fifth resumed with EP 4
    dense     the same recipe with an MLP wider than two experts, by more parameters than the router has
    upcycled  the dense model converted to experts, without further training

Prints a line per seed and writes results.json to FOLDER: held-out losses in nats per token, the largest load violation
of any layer, max_e load_e / mean load - 1, on held-out text, and by how much upcycling changes the loss. Exit code 1 if
any seed misses the goals of the recipe. Runs that are already in FOLDER are not repeated.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import describe
from benchmarks.recipe_runs import prepare_sources, run_main, train
from megalith.insight.corpus import split_by_file, standard_library_sources
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.storage import write_json_atomic
from megalith.training.evaluation import evaluate
from megalith.training.inference import load_model
from megalith.training.tasks.conversion import upcycle_model
from megalith.transformer.moe.router import TopKRouter
from megalith.transformer.moe.routing import Routing

_RECIPE, _STEPS, _STEPS_BEFORE_CHANGE = "moe-tiny", 366, 293  # 1.5 million tokens; 80 %
_DENSE = ("model.preset=llama-4m", "model.ffn_hidden_size=712")
_EXPERTS = ("model.moe.num_experts=8", "model.moe.ffn_hidden_size=356")
_HELD_OUT, _SAMPLES = 0.05, 256
_MOST_VIOLATION, _MOST_DIFFERENCE = 0.5, 1e-5


@dataclass(frozen=True)
class Result:
    """Results for one seed. Losses are in nats per token."""

    seed: int
    experts: float
    dense: float
    violation: float
    upcycling: float

    @property
    def holds(self) -> bool:
        """Whether the recipe meets its goals."""
        even = self.violation < _MOST_VIOLATION
        return self.experts < self.dense and even and self.upcycling < _MOST_DIFFERENCE


def main(folder: Path, seeds: list[int]) -> int:
    """Returns the exit code."""
    text = prepare_sources(folder / "data" / "text", *split_by_file(standard_library_sources(), _HELD_OUT, seed=0))
    results = []
    for seed in seeds:
        results.append(_result(folder / f"seed-{seed}", seed, str(text.prefix), str(text.valid_prefix)))
        print(results[-1], "holds" if results[-1].holds else "FAILS", flush=True)
        record = {"machine": describe(), "steps": _STEPS, "results": [asdict(found) for found in results]}
        write_json_atomic(folder / "results.json", record)
    return 0 if all(found.holds for found in results) else 1


def _result(folder: Path, seed: int, text: str, valid: str) -> Result:
    common = [f"data.train={text}", f"data.valid={valid}", f"train.seed={seed}", f"optim.decay_steps={_STEPS}"]
    experts, dense, upcycled = (folder / name for name in ("experts", "dense", "upcycled"))
    half = "train.micro_batch_size=4"
    train(4, _RECIPE, experts, [*common, half, "parallel.expert=2", f"train.steps={_STEPS_BEFORE_CHANGE}"])
    train(4, _RECIPE, experts, [*common, half, "parallel.expert=4", f"train.steps={_STEPS}"])
    train(2, _RECIPE, dense, [*common, *_DENSE, "train.micro_batch_size=8", f"train.steps={_STEPS}"])
    if not upcycled.exists():
        upcycle_model(dense, upcycled, _EXPERTS)
    (of_experts, violation), (of_dense, _), (of_upcycled, _) = (_held_out(run) for run in (experts, dense, upcycled))
    return Result(seed, of_experts, of_dense, violation, abs(of_upcycled - of_dense))


def _held_out(run: Path) -> tuple[float, float]:
    """The loss of ``run`` on ``_SAMPLES`` held-out samples, and the largest violation of its MoE layers, or 0."""
    trained, loads = load_model(run), defaultdict[nn.Module, Tensor](lambda: torch.zeros((), dtype=torch.int64))

    def add(router: nn.Module, _: Any, routing: Routing) -> None:
        loads[router] = loads[router] + routing.tokens_per_expert

    for module in trained.model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(add)
    samples = trained.task.evaluation_dataset(trained.config.data.valid_sets[""])
    found = evaluate(
        trained.task,
        Pipeline([trained.model]),
        samples,
        trained.config.train.micro_batch_size,
        options=trained.options,
        device=trained.device,
        max_samples=_SAMPLES,
    )
    return found.loss, max((float(load.max() / load.double().mean() - 1) for load in loads.values()), default=0.0)


if __name__ == "__main__":
    run_main(main, __doc__)
