"""Extensions as a user would write them: a layer, a model, a matrix product, a task, an optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.config import OptimConfig, TransformerConfig
from megalith.data.gpt_dataset import GPTBatch
from megalith.models.gpt_model import GPTModel
from megalith.numerics.dropout import dropout
from megalith.optim.optimizer import NamedParameters, parameter_groups
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.training.tasks.pretrain_gpt import GPTInputs, PretrainGPT
from megalith.training.tasks.task import Task
from megalith.transformer.attention_mask import BIDIRECTIONAL
from megalith.transformer.dropout import DropoutSite, sequence_parallel_key
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.layer_spec import LayerSpec
from megalith.transformer.module import ModelModule
from megalith.transformer.stack import LayerStack
from megalith.transformer.stage import Stage


class SquaredReLU(nn.Module):
    """A feed-forward with another activation (So et al. 2021, arXiv:2109.08668) and its own dropout."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        H, F, std = config.hidden_size, 32, config.init_method_std
        self.options = options
        self.up = ColumnParallelLinear(H, F, options, bias=True, std=std, input_is_gathered=True)
        self.down = RowParallelLinear(F, H, options, bias=True, std=std)
        self.dropout = DropoutSite(0.2)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = enter_tensor_parallel(x, self.options.pg_collection.tp, self.options.sequence_parallel)
        y = self.down(torch.relu(self.up(x)).square())
        drops = self.dropout.of(context.hidden_dropout_key)
        return y if drops is None else dropout(y, drops.p, drops.key)


class OtherSecondLayer(PretrainGPT):
    """GPT whose layer 1 has a different feed-forward."""

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> GPTModel:
        return GPTModel(self.config.model, options, stage=stage, spec_of=self.spec_of)

    @staticmethod
    def spec_of(index: int) -> LayerSpec:
        return LayerSpec(feed_forward=SquaredReLU) if index == 1 else LayerSpec()


class Encoder(ModelModule):
    """Attends in both directions, without padding, and returns the loss of every token."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, seed: int) -> None:
        super().__init__()
        V, H, std = config.vocab_size, config.hidden_size, config.init_method_std
        self.options, self.vocab_size = options, V
        self.embedding = VocabParallelEmbedding(V, H, options, std=std)
        self.encoder = LayerStack(config, options, range(config.num_layers))
        self.head = ColumnParallelLinear(H, V, options, bias=True, std=std)
        self.declare_buffer("sign", lambda: torch.tensor([1.0, -1.0]).repeat(H // 2))
        self.finish(seed)

    def layers(self) -> list[nn.Module]:
        return list(self.encoder.values())

    def forward(self, inputs: GPTInputs) -> Tensor:
        groups = self.options.pg_collection
        key = inputs.dropout_key if self.training else None
        sequence_group = groups.tp if self.options.sequence_parallel else None
        hidden_key = None if key is None else sequence_parallel_key(key, sequence_group)
        context = LayerContext(
            mask=BIDIRECTIONAL,
            documents=inputs.packed_seq_params,
            token_dropout_key=key,
            hidden_dropout_key=hidden_key,
        )
        x = self.embedding(inputs.tokens)
        x = self.encoder(x * self.sign.to(x.dtype), context)
        losses = vocab_parallel_cross_entropy(self.head(x), inputs.labels.t(), self.vocab_size, groups.tp)
        return losses.t().clone()


class ReadBothWays(PretrainGPT):
    """An encoder on padded rows: row i of the global batch is i % 4 tokens shorter than the others."""

    costs = Task.costs  # it has no stages

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> Encoder:
        return Encoder(self.config.model, options, self.config.train.seed)

    def collate(self, samples: Sequence[Any], rows: Sequence[int], counted: Sequence[bool] | None = None) -> GPTBatch:
        batch = super().collate(samples, rows, counted)
        for row, number in enumerate(rows):
            batch.loss_mask[row, batch.loss_mask.shape[1] - number % 4 :] = False
        return batch

    def inputs(self, batch: GPTBatch, step: int, device: torch.device) -> GPTInputs:
        S = batch.tokens.shape[1]
        is_token = torch.arange(S) < (S - torch.from_numpy(batch.row_ids) % 4).unsqueeze(1)
        found = super().inputs(batch, step, device)
        return GPTInputs(**{**vars(found), "packed_seq_params": PackedSeqParams.from_padding(is_token)})

    def forward(self, model: nn.Module, inputs: GPTInputs, hidden: Tensor | None) -> Tensor:
        return model(inputs)


class TwoTerms(PretrainGPT):
    """The mean loss of unmasked tokens, plus a quarter of the mean squared loss of all tokens."""

    terms = MappingProxyType({"lm": 1.0, "square": 0.25})

    def counts(self, batch: GPTBatch) -> Mapping[str, int]:
        return {**super().counts(batch), "square": batch.tokens.size}

    def sums(self, output: Tensor, inputs: GPTInputs) -> Mapping[str, Tensor]:
        return {**super().sums(output, inputs), "square": output.square().sum()}


class _Rounded(torch.autograd.Function):
    """x w^T with operands rounded to 8 bits; gradients see the rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = ((each * 16.0).to(torch.float8_e4m3fn).to(each.dtype) / 16.0 for each in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def product_of_8_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _Rounded.apply(x, weight)
    return y if bias is None else y + bias


@dataclass
class Adagrad:
    """Duchi et al. 2011, without torch's optimizers: its own state, updated on each rank's shards."""

    param_groups: list[dict[str, Any]]
    squares: dict[str, tuple[nn.Parameter, Tensor]]
    num_updates: int = 0

    def step(self) -> None:
        self.num_updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                _, total = next(pair for pair in self.squares.values() if pair[0] is parameter)
                weight, gradient, total = (_local(each.detach()) for each in (parameter, parameter.grad, total))
                total += gradient.square()
                weight -= group["lr"] * (gradient / (total.sqrt() + 1e-3) + group["weight_decay"] * weight)

    def zero_grad(self) -> None:
        for parameter, _ in self.squares.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        return {f"optimizer.squares.{name}": total for name, (_, total) in self.squares.items()}

    def set_num_updates_(self, num_updates: int) -> None:
        self.num_updates = num_updates


def build_adagrad(parameters: NamedParameters, config: OptimConfig) -> Adagrad:
    named = dict(parameters)
    groups = parameter_groups(named.items(), config.overrides)
    return Adagrad(groups, {name: (p, torch.zeros_like(p.detach())) for name, p in named.items()})


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
