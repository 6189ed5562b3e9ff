"""Heads of an encoder: masked token prediction, classification of a text, and text embeddings.

    masked token   norm(act(W x + b)), then the output projection over the vocabulary
    pooled         tanh(W x + b) of the first token; a classifier may pool the mean over a text's tokens instead, or use
                   another activation
    classes        W dropout(pooled) + b
    embedding      e / |e|,  e = W x + b of the first token or of the mean; projection and norm are optional

Devlin et al. 2019, "BERT", arXiv:1810.04805; Reimers and Gurevych 2019, "Sentence-BERT", arXiv:1908.10084. Every
rank of tp has complete hidden states here, [S, B, H] or some rows of them, and computes the same result: under sequence
parallelism they are gathered once, before all heads.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import normalize

from megalith.config import TransformerConfig
from megalith.numerics.dropout import DropoutKey, dropout
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import ReplicatedLinear
from megalith.topology.collectives import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.mlp import plain_activation
from megalith.transformer.normalization import Normalization

__all__ = [
    "ClassificationHead",
    "EmbeddingHead",
    "MaskedLMTransform",
    "Pooler",
    "document_means",
    "mean_embeddings",
    "on_whole_rows",
]


def on_whole_rows(options: BuildOptions) -> BuildOptions:
    """Returns ``options`` for modules after the gather of sequence parallelism, where every rank has all tokens."""
    return replace(options, sequence_parallel=False)


class MaskedLMTransform(nn.Module):
    """Transforms hidden states for the output projection; uses gelu if the model's activation is gated."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        H, whole = config.hidden_size, on_whole_rows(options)
        self.activation = config.activation if config.gate_activation is None else "gelu"
        self.dense = ReplicatedLinear(H, H, whole, std=config.init_method_std, bias=True)
        self.norm = Normalization(config, whole)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        y: Tensor = self.norm(plain_activation(self.dense(x), self.activation))
        return y


class Pooler(nn.Module):
    """Computes one vector per text, from its first token or from the mean over its tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions,
        activation: Literal["tanh", "gelu", "gelu_tanh", "relu"] = "tanh",
    ) -> None:
        super().__init__()
        self.activation, H = activation, config.hidden_size
        self.dense = ReplicatedLinear(H, H, on_whole_rows(options), std=config.init_method_std, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        y: Tensor = self.dense(x)
        return torch.tanh(y) if self.activation == "tanh" else plain_activation(y, self.activation)


class ClassificationHead(nn.Module):
    """Scores ``num_classes`` classes from a pooled token; for multiple choice, one class scores each choice.

    ``dropout``: the dropout probability of the pooled token's features.
    """

    def __init__(self, config: TransformerConfig, options: BuildOptions, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = DropoutSite(dropout)
        self.linear = ReplicatedLinear(
            config.hidden_size, num_classes, on_whole_rows(options), std=config.init_method_std, bias=True
        )

    def forward(self, pooled: Tensor, key: DropoutKey | None) -> Tensor:
        """[N, H] -> [N, num_classes]; ``key`` has the token ids [N] of the pooled tokens, None disables dropout."""
        drops = self.dropout.of(key)
        if drops is not None and drops.key is not None:
            pooled = dropout(pooled, drops.p, drops.key)
        scores: Tensor = self.linear(pooled)
        return scores


class EmbeddingHead(nn.Module):
    """Maps one state per text, of its first token or the mean over its tokens, to the text's embedding.

    Args:
        size: features of an embedding; None: those of a hidden state, without a projection.
        normalize: divide embeddings by their norm; one that is zero stays zero.
    """

    def __init__(self, config: TransformerConfig, options: BuildOptions, size: int | None, *, normalize: bool) -> None:
        super().__init__()
        self.normalize, self.projection = normalize, None
        if size is not None:
            self.projection = ReplicatedLinear(
                config.hidden_size, size, on_whole_rows(options), std=config.init_method_std, bias=True
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, D] in float32, or wider for wider states."""
        y = x if self.projection is None else self.projection(x)
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return normalize(wide, dim=-1) if self.normalize else wide


def document_means(
    hidden: Tensor, documents: Tensor, num_documents: int, columns: Tensor, cp_group: ProcessGroup | None
) -> Tensor:
    """Averages the hidden states of each document of each row, over the parts of the row on all ranks of ``cp_group``.

    Special tokens count like all others. An infinite or NaN feature makes those means of its whole row infinite or NaN.

    Args:
        hidden: [S/cp, B, H], the hidden states of this rank's tokens.
        documents: int64 [B, S], of whole rows: the index of each token's document in its row.
        num_documents: D, above every index.
        columns: int64 [S/cp], the positions in the row of this rank's tokens.

    Returns:
        [B, D, H] in float32, or wider for wider states, the same on all ranks; zeros for an index without a token.
        Its gradients are summed over the ranks.
    """
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    numbers = torch.arange(num_documents, device=documents.device)
    is_of = (documents.unsqueeze(-1) == numbers).to(wide.dtype)  # [B, S, D]
    # a product rather than index_add, whose order of summation varies on GPUs
    total = torch.bmm(is_of[:, columns].transpose(1, 2), wide.transpose(0, 1))  # [B, D, H]
    total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(total, cp_group), cp_group)
    return total / is_of.sum(dim=1).clamp(min=1).unsqueeze(-1)


def mean_embeddings(hidden: Tensor, is_token: Tensor) -> Tensor:
    """Averages the hidden states of each row's tokens, without the first and the last, which are special tokens.

    Args:
        hidden: [S, B, H].
        is_token: bool [B, S], False for padding.

    Returns:
        [B, H] in float32, or wider for wider states; zeros for a row without other tokens.
    """
    order = is_token.cumsum(dim=1)
    inner = is_token & (order > 1) & (order < order[:, -1:])  # [B, S]
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    # where, not a product with the mask: inf * 0 in padding would be NaN
    total = torch.where(inner.t().unsqueeze(-1), wide, 0.0).sum(dim=0)  # [B, H]
    return total / inner.sum(dim=1).clamp(min=1).unsqueeze(-1)
