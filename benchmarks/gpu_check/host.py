"""Host overhead of calls; a small model as a CUDA graph, and its layers under ``torch.compile(fullgraph=True)``."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.fusions.calls import measure_calls
from benchmarks.fusions.step import SHAPES
from benchmarks.restartable import Item, Line
from megalith.acceleration.full_cuda_graph import FullCudaGraph
from megalith.models.gpt_model import GPTModel
from megalith.numerics.tolerance import LAYOUT_FLOAT32, NOISE_FLOAT32, gradient_error
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["calls", "compiled", "graph", "items"]

_ROUNDS = 15
_WARM = 3  # the third call of a graph captures it
_AT_ONCE = 10


def items(tiny: bool) -> dict[str, list[Item]]:
    """Items by the name of a job in this module."""
    device = "cpu" if tiny else "cuda"
    return {
        "calls": [Item("calls", (device, 1 if tiny else _ROUNDS))],
        "graph": [Item("CUDA graph", (device, 1 if tiny else _ROUNDS))],
        "compiled": [Item("torch.compile", (device,))],
    }


def calls(device: str, rounds: int) -> Line:
    """Host microseconds of a forward and backward pass on tiny tensors, by call and contender."""
    found = measure_calls(device, rounds)
    return {
        name: {contender: round(1e6 * statistics.median(seconds), 1) for contender, seconds in by_contender.items()}
        for name, by_contender in found.items()
    }


def graph(device: str, rounds: int) -> Line:
    """A small model's forward and backward by ``FullCudaGraph``: its gradients and its speed compared with eager ones.

    ``eager_over_graph`` is the median ratio of the times of iterations back to back. Without a GPU both are eager.
    """
    model, run = _model(device)
    want = [run().clone(), *_gradients(model)]
    captured = FullCudaGraph(run, model.parameters(), torch.device(device))
    for _ in range(_WARM):
        model.zero_grad()
        found = [captured(), *_gradients(model)]
    ratios = [_seconds(model, run, device) / _seconds(model, captured, device) for _ in range(rounds)]
    return _error(found, want) | {"eager_over_graph": round(statistics.median(ratios), 2)}


def _seconds(model: nn.Module, run: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    for _ in range(_AT_ONCE):
        model.zero_grad()
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / _AT_ONCE


def compiled(device: str) -> Line:
    """The same pass, each layer under ``torch.compile(fullgraph=True)``; without a GPU it is only traced."""
    model, run = _model(device)
    want = [run().clone(), *_gradients(model)]
    model.zero_grad()
    for layer in model.model.layers.values():
        layer.compile(fullgraph=True, backend="inductor" if device == "cuda" else "eager")
    return _error([run(), *_gradients(model)], want)


def _model(device: str) -> tuple[GPTModel, Callable[[], Tensor]]:
    shape = SHAPES["quick"]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPTModel(shape.config, BuildOptions(ProcessGroupCollection.single(), torch.float32))
        tokens, labels = torch.randint(shape.config.vocab_size or 0, (2, shape.B, shape.S))

    def run() -> Tensor:
        loss: Tensor = model(tokens, labels=labels).mean()
        loss.backward()
        return loss.detach()

    return model, run


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _error(got: list[Tensor], want: list[Tensor]) -> Line:
    norm = max(w.norm().item() for w in want)
    worst = max(gradient_error(g, w, norm, NOISE_FLOAT32) for g, w in zip(got, want, strict=True))
    if not worst <= LAYOUT_FLOAT32:
        raise ValueError(f"a gradient is {worst:.1e} from eager's, over {LAYOUT_FLOAT32:.0e}")
    return {"worst_gradient": worst}
