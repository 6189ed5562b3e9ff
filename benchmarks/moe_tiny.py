"""Whether a mixture of experts learns more than a dense model of as many active parameters: recipe moe-tiny.

    python -m benchmarks.moe_tiny FOLDER [SEED ...]

For each seed both models see the same tokens of the demo's corpus in the same number of steps, on this machine:

    experts   recipe moe-tiny on 4 ranks, EP 2 x DP 2; the last fifth resumed with EP 4
    dense     the same recipe with an MLP that is wider than two experts by more than the router has parameters
    upcycled  the dense model made into experts, not trained

A line a seed, and results.json in FOLDER: held-out losses in nats per token, the largest violation of even loads over
the layers, max_e load_e / mean load - 1, on held-out text, and by how much upcycling changes the loss. Exit code 1 if
a seed misses what the recipe is for. What is in FOLDER already is not trained again.
"""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.data.prepare import prepare
from megalith.insight.corpus import split_by_file, standard_library_sources
from megalith.resilience.launch import launch
from megalith.storage import write_json_atomic
from megalith.training.inference import evaluate_checkpoint, load_model
from megalith.training.tasks.conversion import upcycle_model
from megalith.transformer.moe.router import TopKRouter
from megalith.transformer.moe.routing import Routing

_RECIPE, _STEPS, _STEPS_BEFORE_CHANGE = "moe-tiny", 366, 293  # 1.5 million tokens; 80 %
_DENSE = ("model.preset=llama-4m", "model.ffn_hidden_size=712")
_EXPERTS = ("model.moe.num_experts=8", "model.moe.ffn_hidden_size=356")
_VOCABULARY, _HELD_OUT, _SAMPLES = 2048, 0.05, 256
_MOST_VIOLATION, _MOST_DIFFERENCE = 0.5, 1e-5


@dataclass(frozen=True)
class Result:
    """Of one seed. Losses are in nats per token."""

    seed: int
    experts: float
    dense: float
    violation: float
    upcycling: float

    @property
    def holds(self) -> bool:
        """Whether the recipe does what it is for."""
        even = self.violation < _MOST_VIOLATION
        return self.experts < self.dense and even and self.upcycling < _MOST_DIFFERENCE


def main(folder: Path, seeds: list[int]) -> int:
    """The exit code."""
    train, valid = _data(folder / "data")
    results = []
    for seed in seeds:
        results.append(_result(folder / f"seed-{seed}", seed, train, valid))
        print(results[-1], "holds" if results[-1].holds else "FAILS", flush=True)
        write_json_atomic(folder / "results.json", {"steps": _STEPS, "results": [asdict(found) for found in results]})
    return 0 if all(found.holds for found in results) else 1


def _data(folder: Path) -> tuple[str, str]:
    kept, held_out = split_by_file(standard_library_sources(), _HELD_OUT, seed=0)
    found = prepare(kept, folder / "text", vocab_size=_VOCABULARY, valid=held_out, processes=os.cpu_count() or 1)
    return str(found.prefix), str(found.valid_prefix)


def _result(folder: Path, seed: int, train: str, valid: str) -> Result:
    common = [f"data.train={train}", f"data.valid={valid}", f"train.seed={seed}", f"optim.decay_steps={_STEPS}"]
    experts, dense, upcycled = (folder / name for name in ("experts", "dense", "upcycled"))
    half = ["train.micro_batch_size=4", f"run={experts}"]
    _train(4, [*common, *half, "parallel.expert=2", f"train.steps={_STEPS_BEFORE_CHANGE}"], folder)
    _train(4, [*common, *half, "parallel.expert=4", f"train.steps={_STEPS}"], folder)
    _train(2, [*common, *_DENSE, "train.micro_batch_size=8", f"run={dense}", f"train.steps={_STEPS}"], folder)
    if not upcycled.exists():
        upcycle_model(dense, upcycled, _EXPERTS)
    losses = [evaluate_checkpoint(run, None, _SAMPLES)[0].loss for run in (experts, dense, upcycled)]
    return Result(seed, losses[0], losses[1], _violation(experts, valid), abs(losses[2] - losses[1]))


def _train(num_ranks: int, overrides: list[str], folder: Path) -> None:
    if code := launch(num_ranks, ["train", _RECIPE, *overrides], folder / "logs", lambda line: None):
        raise SystemExit(f"megalith train {_RECIPE} {' '.join(overrides)} ended with exit code {code}")


def _violation(run: Path, valid: str) -> float:
    """The largest over layers, of the loads on ``_SAMPLES`` held-out samples."""
    loads: dict[int, Tensor] = {}

    def add(router: nn.Module, _: Any, routing: Routing) -> None:
        loads[id(router)] = loads.get(id(router), 0) + routing.tokens_per_expert

    trained = load_model(run)
    for module in trained.model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(add)
    tokens = trained.task.valid_samples(valid)  # placeholder
    with torch.no_grad():
        trained.model(tokens)
    return max(float(load.max() / load.double().mean() - 1) for load in loads.values())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3]))
