"""The loss on held-out text: every token of it once, in any layout the same mean."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megalith.data.gpt_dataset import EvaluationDataset
from megalith.data.loader import MicroBatch, stack
from megalith.models.gpt_model import GPTModel
from megalith.parallel.sharding.fsdp import release_gathered_weights
from megalith.training.batch import InputMaker
from megalith.training.loss import loss_sum

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token; num_tokens: how many it is the mean of."""

    loss: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    model: GPTModel,
    dataset: EvaluationDataset,
    make_inputs: InputMaker,
    micro_batch_size: int,
    *,
    max_samples: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Evaluation:
    """The mean loss over ``max_samples`` samples spread evenly over ``dataset`` (None: all of them).

    The same samples each time, dealt over the data-parallel ranks; all ranks call it together and get the same answer.
    Nothing of the training is touched: mode, data position and randomness stay as they are.
    """
    num_samples = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    B = micro_batch_size
    num_micro_batches = -(-num_samples // (B * dp_size))
    sums = torch.zeros(2, dtype=torch.float64, device=make_inputs.device)
    was_training = model.training
    model.eval()
    for index in range(num_micro_batches):
        first = (index * dp_size + dp_rank) * B
        micro_batch = _rows(dataset, range(first, first + B), num_samples)
        inputs = make_inputs(micro_batch, 0)
        sums += torch.stack((loss_sum(model, inputs).double(), inputs.loss_mask.sum().double()))
    release_gathered_weights(model)
    model.train(was_training)
    if dp_size > 1:
        dist.all_reduce(sums, group=model.pg_collection.dp)
    loss, num_tokens = sums.tolist()
    return Evaluation(loss / max(1.0, num_tokens), int(num_tokens))


def _rows(dataset: EvaluationDataset, numbers: range, num_samples: int) -> MicroBatch:
    """The ``numbers`` of ``num_samples`` samples in even steps; past the end the last one, with nothing of it counted.

    Every rank runs the same number of micro-batches, because a sharded model's forward is a collective.
    """
    rows = [min(number, num_samples - 1) * len(dataset) // num_samples for number in numbers]
    micro_batch = stack([dataset[row] for row in rows], rows)
    micro_batch.loss_mask[np.array(numbers) >= num_samples] = False
    return micro_batch
