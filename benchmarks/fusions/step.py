"""A whole training step of a Llama or Mixtral, with and without fusions, compared with those of other libraries.

All contenders start from the same weights, see the same random batch, and update with torch's fused AdamW. On a CPU,
which other processes may slow down, they take turns; on a GPU they run one after another, because memory does not hold
them all. Off means ``fusions.use("reference")``: the same model in plain torch. Hugging Face's Llama and a plain one
also run with ``megalith.fusions`` inserted, which shows what users of the fusions alone gain. The loss of the first
step must match that of Hugging Face's model to 1e-2, the accuracy of bfloat16. After the rounds, our own step is
profiled, kernel by kernel.
"""

import contextlib
import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fusions import waterfall
from benchmarks.fusions.clock import Clock, Memory, memory_of, product_rate
from benchmarks.fusions.plain_llama import FUSED, PLAIN, Parts, PlainLlama
from benchmarks.fusions.swapped import llama_of_its_own, use_fusions
from benchmarks.hugging_face import causal_lm, load_by_name
from benchmarks.rounds import Spread
from megalith import fusions
from megalith.acceleration.full_cuda_graph import FullCudaGraph
from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.observe.energy_sources import energy_source
from megalith.observe.units import quantity
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.gpt_size import flops_per_token

__all__ = ["BASE", "OURS", "SHAPES", "Shape", "StepFigures", "as_markdown", "measure_steps"]

log = logging.getLogger(__name__)

BASE, OURS = "Hugging Face", "Megalith, fusions on"
_TOLERANCE = 1e-2  # nats
_STEPS = 3  # back to back
_SECONDS_OF_ENERGY = 5.0  # of steps; a GPU's counter advances every few tens of milliseconds
MIB = 1 << 20
Loss = Callable[[], tuple[nn.Module, Tensor]]
Builder = Callable[[], Loss]


@dataclass(frozen=True)
class Shape:
    """A model, and its batch of ``B`` rows of ``S`` tokens."""

    title: str
    config: TransformerConfig
    S: int
    B: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def dtype_name(self) -> str:
        """The name used in settings."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def flops(self) -> int:
        """Model FLOPs of a step, with causal attention halved."""
        return self.S * self.B * flops_per_token(self.config, self.config.vocab_size or 0, self.S)


def _shape(title: str, L: int, H: int, A: int, G: int, F: int, V: int, S: int, B: int, E: int = 0) -> Shape:
    model = {
        "num_layers": L,
        "hidden_size": H,
        "num_attention_heads": A,
        "num_query_groups": G,
        "ffn_hidden_size": F,
        "vocab_size": V,
        "moe": {"num_experts": E, "top_k": 2} if E else None,
    }
    return Shape(title, TransformerConfig.model_validate(model), S, B)


SHAPES = {
    "cuda": _shape("1B Llama", L=16, H=2048, A=32, G=8, F=8192, V=128256, S=4096, B=2),
    "cpu": _shape("28M Llama", L=6, H=512, A=8, G=8, F=1408, V=8192, S=512, B=4),
    "quick": _shape("tiny Llama", L=2, H=64, A=4, G=2, F=128, V=256, S=64, B=2),
    "cuda mixtral": _shape("3.4B Mixtral, 8 experts", L=8, H=4096, A=32, G=8, F=3584, V=32000, S=4096, B=2, E=8),
    "cpu mixtral": _shape("47M Mixtral, 8 experts", L=4, H=512, A=8, G=8, F=704, V=8192, S=512, B=4, E=8),
    "quick mixtral": _shape("tiny Mixtral, 4 experts", L=2, H=64, A=4, G=2, F=64, V=256, S=64, B=2, E=4),
}


@dataclass
class StepFigures:
    """Seconds of each round, peak memory of a step beyond parameters and moments, and the first loss.

    On a GPU, ``seconds`` is device time, with launches hidden; ``wall`` is host time per step, of steps back to back.
    ``joules`` is the energy per step of steps back to back, of the whole device, if it has a counter. ``rate`` is
    the FLOP/s of a large bfloat16 matmul right afterwards, on a GPU; ``parts`` is the time breakdown.
    """

    seconds: list[float] = field(default_factory=list)
    memory: Memory | None = None
    loss: float = float("nan")
    wall: float = float("nan")
    joules: float | None = None
    rate: float | None = None
    parts: list[waterfall.Part] = field(default_factory=list)
    failure: str | None = None


def measure_steps(
    shape: Shape, device: str, rounds: int, keep: Callable[[dict[str, StepFigures]], None] = lambda _: None
) -> dict[str, StepFigures]:
    """Measures steps of all contenders; calls ``keep`` with the figures so far after each group of contenders."""
    torch.manual_seed(0)
    weights = {name: x.detach().clone() for name, x in _hugging_face(shape, device).named_parameters()}
    tokens, labels = torch.randint(shape.config.vocab_size or 0, (2, shape.B, shape.S), device=device)
    builders = _builders(shape, device, weights, tokens, labels)
    clock, figures = Clock(device), dict[str, StepFigures]()
    for names in [list(builders)] if device == "cpu" else [[name] for name in builders]:
        _take_turns({name: builders[name] for name in names}, figures, clock, device, rounds)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            if shape.dtype is torch.bfloat16:
                figures[names[0]].rate = product_rate(clock, device)
        keep(figures)
    return figures


def _builders(
    shape: Shape, device: str, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor
) -> dict[str, Builder]:
    given = (shape, device, weights, tokens, labels)

    def theirs(prepare: Callable[[Any], None] = lambda _: None, experts: str = "grouped_mm") -> Builder:
        return lambda: _their_loss(_hugging_face(shape, device, weights, experts, prepare), tokens, labels)

    def plain(parts: Parts) -> Builder:
        return lambda: _plain_loss(*given, parts)

    builders = {
        BASE: theirs(),
        OURS: lambda: _our_loss(*given, contextlib.nullcontext),
        "Megalith, fusions off": lambda: _our_loss(*given, lambda: fusions.use("reference")),
        "Hugging Face, compiled": theirs(_compile),
    }
    if shape.config.moe is None:
        builders |= {
            "Hugging Face + megalith.fusions": lambda: _with_fusions(*given),
            "Plain torch": plain(PLAIN),
            "Plain torch + megalith.fusions": plain(FUSED),
        }
    else:
        builders["Hugging Face, experts one by one"] = theirs(experts="eager")
    if device == "cuda":
        builders["Megalith, in a CUDA graph"] = lambda: _graphed(_our_loss(*given, contextlib.nullcontext), device)
        # last, because it patches Hugging Face's module, which the other contenders share
        builders["Hugging Face + Liger"] = lambda: _their_loss(_with_liger(shape, device, weights), tokens, labels)
    return builders


def _take_turns(
    builders: dict[str, Builder], figures: dict[str, StepFigures], clock: Clock, device: str, rounds: int
) -> None:
    """Adds the figures of ``builders`` to ``figures``, with interleaved steps."""
    running = {}
    for name, build in builders.items():
        one = figures[name] = StepFigures()
        with _failing_alone(name, one):
            running[name] = _first_step(build(), one, device, figures[BASE].loss)
    for _ in range(rounds):
        for name, step in running.items():
            if not figures[name].failure:
                with _failing_alone(name, figures[name]):
                    figures[name].seconds.append(clock.seconds(step))
    for name, step in running.items():
        if not figures[name].failure:
            with _failing_alone(name, figures[name]):
                figures[name].wall = _back_to_back(step, device, _STEPS)
                figures[name].joules = _joules(step, device, figures[name].wall)
    if OURS in running and not figures[OURS].failure:
        figures[OURS].parts = waterfall.parts_of(running[OURS], device)


@contextlib.contextmanager
def _failing_alone(name: str, figures: StepFigures) -> Iterator[None]:
    """Turns an exception into the reason a contender has no numbers; the others continue."""
    try:
        yield
    except Exception as error:
        figures.failure = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        figures.seconds.clear()
        log.warning("%s: %s", name, figures.failure)


def _back_to_back(step: Callable[[], None], device: str, num_steps: int) -> float:
    """Host seconds per step, over ``num_steps`` without synchronization in between."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_steps


def _joules(step: Callable[[], None], device: str, seconds: float) -> float | None:
    """Joules per step of ``seconds``; None if there is no counter that can be read."""
    try:
        source = energy_source(torch.device(device))
    except ConfigError as error:
        log.info("energy is not measured: %s", error)
        return None
    num_steps = math.ceil(_SECONDS_OF_ENERGY / seconds)
    with contextlib.closing(source):
        before = source.joules()
        _back_to_back(step, device, num_steps)
        after = source.joules()
    return None if before is None or after is None else (after - before) / num_steps


def as_markdown(figures: dict[str, StepFigures], shape: Shape) -> str:
    """A row for each contender: speed-up over Hugging Face's eager model, and memory."""
    lines = [f"### Training step, {shape.title}, {shape.B} x {shape.S} tokens, {shape.dtype_name}", ""]
    lines += [
        "| contender | ms | speed-up over base [quartiles] | ms back to back | tokens/s | of matmul rate "
        "| J per 1,000 tokens | peak MiB beyond weights | first loss |",
        "|---" * 9 + "|",
    ]
    base = figures[BASE]
    for name, one in figures.items():
        if one.failure:
            lines.append(f"| {name} | {one.failure.replace('|', '/')} | | | | | | | |")
            continue
        spread = ""
        if base.seconds:
            ratio = Spread.of([theirs / ours for theirs, ours in zip(base.seconds, one.seconds, strict=True)])
            spread = f"{ratio.median:.2f} [{ratio.low:.2f}..{ratio.high:.2f}]"
        peak = "" if one.memory is None else f"{one.memory.peak / MIB:.0f}"
        seconds = statistics.median(one.seconds)
        share = "" if one.rate is None else f"{100 * shape.flops / seconds / one.rate:.0f}%"
        tokens = shape.B * shape.S
        joules = "" if one.joules is None else quantity(1e3 * one.joules / tokens)
        speed = f"{tokens / seconds:.0f} | {share} | {joules}"
        lines.append(
            f"| {name} | {1e3 * seconds:.0f} | {spread} | {1e3 * one.wall:.0f} | {speed} | {peak} | {one.loss:.4f} |"
        )
    ours = figures.get(OURS, StepFigures())
    if ours.parts:
        lines += ["", f"{OURS}, by kernel or operator:", ""]
        lines.append(waterfall.as_markdown(ours.parts, statistics.median(ours.seconds)))
    return "\n".join(lines) + "\n"


def _first_step(loss: Loss, figures: StepFigures, device: str, want: float) -> Callable[[], None]:
    """Checks the first loss, measures memory, and returns the step to time."""
    model, value = loss()
    figures.loss = value.item()
    if not abs(figures.loss - want) <= _TOLERANCE and want == want:
        raise ValueError(f"wrong: its first loss is {figures.loss:.4f}, the base has {want:.4f}")
    _backward(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> None:
        _backward(loss()[1])
        optimizer.step()
        optimizer.zero_grad()

    step()
    figures.memory = memory_of(step, device)
    return step


def _backward(value: Tensor) -> None:
    if value.requires_grad:  # not if a graph has run the backward too
        value.backward()


def _graphed(loss: Loss, device: str) -> Loss:
    """``loss`` and its backward as a CUDA graph."""
    model, _ = loss()

    def iteration() -> Tensor:
        value = loss()[1]
        value.backward()
        return value

    graph = FullCudaGraph(iteration, model.parameters(), torch.device(device))
    return lambda: (model, graph())


def _our_loss(
    shape: Shape, device: str, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor, context: Callable[[], Any]
) -> Loss:
    with torch.device(device):
        model = GPTModel(shape.config, BuildOptions(ProcessGroupCollection.single(), shape.dtype))
    load_by_name(model, weights)

    def loss() -> tuple[nn.Module, Tensor]:
        with context():
            return model, model(tokens, labels=labels).mean()

    return loss


def _their_loss(model: Any, tokens: Tensor, labels: Tensor) -> Loss:
    # passed as shift_labels, so that they are not shifted again
    return lambda: (model, model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss)


def _hugging_face(
    shape: Shape,
    device: str,
    weights: dict[str, Tensor] | None = None,
    experts: str = "grouped_mm",
    prepare: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Its model, after ``prepare``; with an implementation of ``experts``, if it has any."""
    with torch.device(device):
        model = causal_lm(shape.config, shape.S, shape.dtype, experts=experts)
    if weights is not None:
        load_by_name(model, weights)
    prepare(model)
    return model


def _with_fusions(shape: Shape, device: str, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Loss:
    llama = llama_of_its_own()
    with torch.device(device):
        model = causal_lm(shape.config, shape.S, shape.dtype, module=llama)
    model.load_state_dict(weights)
    use_fusions(llama, model)
    shifted = labels.roll(1, dims=1)  # shifted back by the page's loss, which omits the last token
    return lambda: (model, model(input_ids=tokens, labels=shifted, use_cache=False).loss)


def _plain_loss(
    shape: Shape, device: str, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor, parts: Parts
) -> Loss:
    with torch.device(device):
        model = PlainLlama(shape.config, parts).to(shape.dtype)
    model.load_state_dict(weights)
    return lambda: (model, model(tokens, labels))


def _compile(model: nn.Module) -> None:
    model.compile()


def _with_liger(shape: Shape, device: str, weights: dict[str, Tensor]) -> Any:
    from liger_kernel import transformers as liger

    apply = liger.apply_liger_kernel_to_llama if shape.config.moe is None else liger.apply_liger_kernel_to_mixtral
    return _hugging_face(shape, device, weights, prepare=lambda model: apply(model=model))
