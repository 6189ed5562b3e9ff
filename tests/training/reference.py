"""An independent implementation of a run: one process, no sharding, no micro-batches, torch's own optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.config import RunConfig, load_run
from megalith.data.gpt_dataset import GPTDataset, GPTSample
from megalith.data.samples import Samples
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import DropoutKey
from megalith.numerics.tolerance import LAYOUT_FLOAT64, gradient_error
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.step_record import MicroBatchRecord, StepRecord

LossOfStep = Callable[[GPTModel, RunConfig, Samples[GPTSample], int, MicroBatchRecord], Tensor]


@dataclass
class Trajectory:
    """For each step: loss, gradient norm before clipping, gradients after it; also the first and the last weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)

    def initial_differs(self, other: "Trajectory") -> bool:
        """Whether the initial weights differ by more than the rounding to a narrower dtype."""
        return any(not torch.equal(self.initial[name].float(), w.float()) for name, w in other.initial.items())


def reference(
    tree: dict[str, Any],
    num_steps: int = 2,
    samples: Samples[GPTSample] | Sequence[GPTSample] = (),
    loss_of: LossOfStep | None = None,
) -> Trajectory:
    """The first steps of the run that ``tree`` describes, each global batch in one forward, or with ``loss_of``.

    ``samples``: those that the run reads, if they are not those of one dataset of text.
    """
    config = load_run(tree)
    torch.manual_seed(0)
    model = GPTModel(config.model, BuildOptions(ProcessGroupCollection.single(), torch.float64), seed=config.train.seed)
    named = dict(model.named_parameters())
    is_decayed = {name: p.ndim > 1 and not name.endswith("bias") for name, p in named.items()}
    decayed = [p for name, p in named.items() if is_decayed[name]]
    plain = [p for name, p in named.items() if not is_decayed[name]]
    optim = config.optim
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.model.mup is not None:
        groups = _groups_of_mup(named, config)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.adamw.betas, eps=optim.adamw.eps)
    dataset = samples or GPTDataset(config.data.train, config.data.seq_length, config.train.seed)
    found = Trajectory(initial={name: p.detach().clone() for name, p in named.items()})
    for step in range(num_steps):
        record = StepRecord(1.0)
        loss = (loss_of or _loss)(model, config, dataset, step, record.micro_batch(0))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm or float("inf"))
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        found.gradients.append({name: p.grad.clone() for name, p in named.items()})
        optimizer.step()
        optimizer.zero_grad()
        for layer, router in model.routers().items():
            router.update_balance_(record.tokens_per_expert(layer), record.total("quantile_offsets", layer))
    found.final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found


def _groups_of_mup(named: dict[str, Tensor], config: RunConfig) -> list[dict[str, Any]]:
    """One parameter group per parameter; table 8 of arXiv:2203.03466, for a model without experts."""
    optim, groups = config.optim, []
    width = config.model.hidden_size / config.model.mup.base_hidden_size
    for name, parameter in named.items():
        is_hidden = parameter.ndim > 1 and ".layers." in name
        groups.append(
            {
                "params": [parameter],
                "lr": optim.lr / (width if is_hidden else 1),
                "eps": optim.adamw.eps / width,
                "weight_decay": optim.weight_decay * (width if is_hidden else parameter.ndim > 1),
            }
        )
    return groups


def _loss(
    model: GPTModel, config: RunConfig, dataset: Samples[GPTSample], step: int, record: MicroBatchRecord
) -> Tensor:
    G, S = config.train.global_batch_size, config.data.seq_length
    samples = [dataset[step * G + row] for row in range(G)]
    tokens, labels = (torch.tensor([list(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
    packed = positions = None
    if config.data.reset_attention_mask or config.data.reset_position_ids:
        # documents, derived again from the tokens themselves: a new one begins after each end-of-document token
        starts = torch.nn.functional.pad(tokens[:, :-1] == 0, (1, 0)).long()
        documents = starts.cumsum(1)
        if config.data.reset_attention_mask:
            packed = PackedSeqParams.from_documents(documents)
        if config.data.reset_position_ids:
            first = torch.where(starts.bool(), torch.arange(S), 0).cummax(1).values
            positions = torch.arange(S) - first
    key = None
    if model.drops():
        key = DropoutKey(config.train.seed, step, torch.arange(G * S).view(G, S))
    counted = tokens != 0 if config.data.eod_mask_loss else torch.ones_like(tokens, dtype=torch.bool)
    mtp = config.model.mtp
    num_ahead = 0 if mtp is None else mtp.num_modules
    if mtp is not None:
        labels = torch.stack([labels.roll(-depth, dims=1) for depth in range(1 + num_ahead)])
    losses = model(
        tokens, labels=labels, position_ids=positions, packed_seq_params=packed, dropout_key=key, record=record
    )
    total = losses.view(-1, G, S)[0][counted].sum() / counted.sum()
    for depth in range(1, 1 + num_ahead):
        # token by token: a document ends with its end-of-document token
        ahead = [
            (row, s)
            for row in range(G)
            for s in range(S - depth)
            if (tokens[row, s : s + depth] != 0).all() and counted[row, s + depth]
        ]
        total = total + mtp.loss_weight / num_ahead * sum(losses[depth, row, s] for row, s in ahead) / len(ahead)
    return total


def differences(got: Trajectory, want: Trajectory) -> list[str]:
    """The names of everything in which ``got`` differs from ``want`` by more than the tolerance."""
    wrong = [name for name in want.initial if not torch.equal(got.initial[name], want.initial[name])]
    found = [f"initial {name}" for name in wrong]
    for step, (loss, norm) in enumerate(zip(want.losses, want.norms, strict=True)):
        if not abs(got.losses[step] - loss) <= LAYOUT_FLOAT64 * abs(loss):
            found.append(f"loss of step {step}: {got.losses[step]} for {loss}")
        if not abs(got.norms[step] - norm) <= LAYOUT_FLOAT64 * norm:
            found.append(f"norm of step {step}: {got.norms[step]} for {norm}")
        found += _apart(f"gradient {step}", got.gradients[step], want.gradients[step])
    return found + _apart("final", got.final, want.final)


def _apart(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    all_norm = torch.stack([tensor.norm() for tensor in want.values()]).norm().item()
    assert got.keys() == want.keys()
    errors = {name: float(gradient_error(got[name], tensor, all_norm)) for name, tensor in want.items()}
    return [f"{what} {name}: {error:.1e}" for name, error in errors.items() if not error < LAYOUT_FLOAT64]
