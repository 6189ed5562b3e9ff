"""Records what the first steps of a run compute on one rank: weights, module outputs, losses, gradients, norms.

A record is in causal order: if several entries differ between two runs, the first one is closest to the cause. Module
entries are rows of the residual stream with the global index of their token, so that a rank may hold any of them.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.config import RunConfig
from megalith.data.sampler import microbatch_sample_ids
from megalith.optim.grad_norm import clip_coefficient
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.parallel.parameters import declared_parameters
from megalith.resilience.stop_request import StopRequest
from megalith.training.loop import Callback, FinishedStep, train
from megalith.training.run import Run
from megalith.training.setup import build_run

__all__ = ["Entry", "Key", "Record", "record_steps"]


class Key(NamedTuple):
    """Identifies an entry. ``step`` counts from 1; weights are those after that step."""

    step: int
    kind: Literal["weight", "module", "loss", "gradient", "norm"]
    name: str


class Entry(NamedTuple):
    """A whole tensor; or the rows [T, ...] of it that this rank holds, with the sorted ids of their ``tokens``."""

    values: Tensor
    tokens: Tensor | None = None


Record = Mapping[Key, Entry]


def record_steps(config: RunConfig) -> Record:
    """Trains with ``config`` on CPUs and records every step; called by all ranks of the default process group."""
    run = build_run(config, torch.device("cpu"))
    recorder = _Recorder(run)
    train(run, [recorder], StopRequest(_say_nothing))
    return recorder.record


class _Recorder(Callback):
    """Fills ``record`` while ``run`` trains."""

    def __init__(self, run: Run) -> None:
        self.record: dict[Key, Entry] = {}
        self._modules = _ModuleRecorder(run)
        self._gradients: dict[str, Tensor] = {}
        self._add_weights(run)
        update = run.optimizer.step

        def recording_step() -> None:
            self._gradients = {
                name: _whole(p.grad) for name, p, _ in declared_parameters(*run.chunks) if p.grad is not None
            }
            update()

        run.optimizer.step = recording_step  # type: ignore[method-assign]

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        step, result = run.state.step, finished.result
        for name, entry in self._modules.taken().items():
            self.record[Key(step, "module", name)] = entry
        self.record[Key(step, "loss", "the loss")] = Entry(torch.tensor(result.loss, dtype=torch.float64))
        # undo clipping, whose factor follows from the norm
        clipped = clip_coefficient(result.grad_norm, run.config.optim.clip_norm)
        for name in self._modules.in_backward_order(self._gradients):
            self.record[Key(step, "gradient", name)] = Entry(self._gradients[name] / clipped)
        norm = torch.tensor(result.grad_norm, dtype=torch.float64)
        self.record[Key(step, "norm", "the norm of all gradients")] = Entry(norm)
        if step == run.config.train.steps:
            self._add_weights(run)

    def _add_weights(self, run: Run) -> None:
        for name, tensor in run.weights().items():
            self.record[Key(run.state.step, "weight", name)] = Entry(_whole(tensor))


class _ModuleRecorder:
    """Records inputs and outputs of modules on the residual stream, and the loss of each token, with forward hooks.

    Hooks only record during the forward of a whole chunk, so that nothing is recorded again in recomputation. If a
    module is called several times in a forward, the first call is recorded.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._order: dict[str, int] = {}  # modules in the order of their first calls
        self._forwards: dict[tuple[int, nn.Module], int] = defaultdict(int)
        # token ids [S/cp, B] of the micro-batch in the current forward, one for each row of a sample
        self._rows: tuple[Tensor, ...] | None = None
        self._recorded: set[str] = set()  # in the current forward
        self._found: dict[str, list[Entry]] = defaultdict(list)
        for chunk in run.chunks:
            # modules that contain layers have different inputs and outputs in each stage
            layers = set(chunk.layers())
            holding = {module for module in chunk.modules() if layers & set(module.modules()) - {module}}
            # a copied weight has the name of a module in another stage, which is called with other tokens
            copies = {id(weight) for weight in chunk.copied_weights()}
            for name, module in chunk.named_modules():
                if module not in holding and copies.isdisjoint(map(id, module.parameters(recurse=False))):
                    module.register_forward_pre_hook(partial(self._goes_in, name))
                    module.register_forward_hook(partial(self._comes_out, name))
            chunk.register_forward_pre_hook(self._begin)
            chunk.register_forward_hook(self._end)

    def taken(self) -> dict[str, Entry]:
        """Returns what was recorded since the last call, sorted by token."""
        found, self._found = self._found, defaultdict(list)
        return {name: _joined(entries) for name, entries in found.items()}

    def in_backward_order(self, names: Mapping[str, Any]) -> list[str]:
        """Sorts parameter names by when their gradients are complete in the backward."""
        places: dict[str, tuple[int, int]] = {}
        at = -1
        for index, (path, _) in enumerate(chain(*(chunk.named_modules() for chunk in self._run.chunks))):
            # a module that is used without being called follows the previous one
            at = self._order.get(path, at)
            places[path] = at, index
        return sorted(names, key=lambda name: places[name.rpartition(".")[0]], reverse=True)

    def _begin(self, chunk: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():  # the first of two passes of a JointTask, which computes the same
            return
        run, consumed = self._run, self._run.state.consumed_samples
        sizes = run.microbatches.global_batch_size(consumed), run.config.train.micro_batch_size
        groups, lengths = run.pg_collection, run.task.row_lengths
        shares = microbatch_sample_ids(consumed, *sizes, groups.rank("dp"), groups.size("dp"))
        samples = torch.tensor(shares[self._forwards[consumed, chunk]])
        self._forwards[consumed, chunk] += 1
        positions = (zigzag_positions(S, groups.size("cp"), groups.rank("cp")) for S in lengths)
        starts = accumulate(lengths[:-1], initial=0)
        self._rows = tuple(
            samples * sum(lengths) + start + of_row.unsqueeze(1)
            for start, of_row in zip(starts, positions, strict=True)
        )
        self._recorded.clear()

    def _end(self, chunk: nn.Module, _: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        rows, self._rows = self._rows, None
        if rows is None:
            return
        tokens = rows[-1]  # the last row of a sample is the one with a loss
        losses = output[0] if isinstance(output, tuple) else output  # the first of several outputs
        of_tokens = losses.shape[-2:] == tokens.t().shape  # a classifier has none
        if of_tokens and self._run.pipeline.holds_output(chunk):
            losses = losses.detach().clone().reshape(-1, *tokens.t().shape).permute(2, 1, 0)  # [S/cp, B, terms]
            self._found["the loss of each token"].append(Entry(losses.flatten(0, 1), tokens.flatten()))

    def _goes_in(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._rows is not None:
            self._order.setdefault(name, len(self._order))
            self._add(f"the input of {name}", inputs[0] if inputs else None)

    def _comes_out(self, name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        if self._rows is not None:
            self._add(f"the output of {name}", output)

    def _add(self, what: str, x: object) -> None:
        """Records hidden states [S/cp, B, H], or [S/cp/tp, B, H] with sequence parallelism; ignores other tensors."""
        run, groups, rows = self._run, self._run.pg_collection, self._rows
        assert rows is not None, "in a forward pass"
        if what in self._recorded or not isinstance(x, Tensor):
            return
        for tokens in rows:
            if run.options.sequence_parallel:
                tokens = tokens.chunk(groups.size("tp"))[groups.rank("tp")]
            if x.shape == (*tokens.shape, run.config.model.hidden_size):
                self._recorded.add(what)
                self._found[what].append(Entry(x.detach().clone().flatten(0, 1), tokens.flatten()))
                return


def _joined(entries: list[Entry]) -> Entry:
    tokens = torch.cat([entry.tokens for entry in entries if entry.tokens is not None])
    order = tokens.argsort()
    return Entry(torch.cat([entry.values for entry in entries])[order], tokens[order])


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _say_nothing(line: str) -> None:
    """Ignores messages about stop requests."""
