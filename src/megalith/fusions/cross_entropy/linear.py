"""Output projection fused with cross entropy: only one chunk of tokens has its logits in memory at a time.

    logits = x weight^T + bias              then the loss of ``fused_cross_entropy``, with its options
    dx     = dlogits weight                 summed over the ranks that share the vocabulary, or reduce-scattered
    dw     = sum over T of dlogits^T x      dbias = sum over T of dlogits

Forward computes the statistics of the logits chunk by chunk, discards the logits, and gathers the statistics of all
tokens in one collective. Backward recomputes the logits of all tokens, for one part of the vocabulary at a time (or of
some tokens, if there are more tokens than words), overwrites them with their gradient, and multiplies. Upstream
gradients may therefore differ per token, and evaluation computes no gradients. Computing gradients in forward would
save a quarter of the multiplications, but requires the upstream gradient in advance: see Hsu et al. 2024, "Liger
Kernel", arXiv:2410.10989. Wijmans et al. 2024, "Cut Your Losses", arXiv:2411.09009, never store logits.

T tokens (leading dimensions flattened), H hidden, V vocabulary. Saved for backward: x, weight and bias themselves, 12T
bytes of statistics and the targets. Lower bound: 8THV/tp operations, 2 forward and 6 backward; in addition to inputs
and gradients, ``chunk_size`` V/tp elements of memory, and in backward the smaller of dx and dweight in float32.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape
from megalith.fusions.cross_entropy.linear_formulas import blocked, reference
from megalith.fusions.cross_entropy.options import Smoothing, check_target, part_of_rank, terms_of
from megalith.fusions.cross_entropy.steps import Steps, loss_of_parts
from megalith.topology.collectives import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

__all__ = ["FUSION", "fused_linear_cross_entropy"]

# tokens; on an H200, 512 to 8192 of 8192 take equally long (benchmarks/results/gpu-tests-20261127.md)
_CHUNK_SIZE = 2048


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    label_smoothing: float = 0.0,
    smoothing: Smoothing = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Returns ``fused_vocab_parallel_cross_entropy(linear(x, weight, bias), target, ...)`` without storing the logits.

    Logits are rounded to the dtype of ``x``, as in linear; autocast has no effect inside.

    Args:
        x: [..., H], floating point, the same on all ranks of ``tp_group``. Its gradient is summed over them here, so
            ``x`` must not come from a region that sums it too (``copy_to_tensor_model_parallel_region``).
        weight: [V/tp, H], this rank's part, in the dtype of ``x``.
        target: int64 [...], vocabulary indices in [0, V); other values make the loss and the gradients NaN.
        tp_group: the ranks that share the vocabulary; None for one rank.
        bias: [V/tp], in the dtype of ``x``.
        sequence_parallel: ``x`` is [S/tp, ..., H], this rank's part of dim 0. It is gathered here, and its gradient is
            reduce-scattered. ``target`` is not split.
        chunk_size: tokens whose logits are in memory at a time, by default 2048; all on reference and compile paths.
            Backward holds as many logits, of all tokens for a part of the vocabulary, which has at least 64 words.
        label_smoothing: this and the rest as in ``fused_vocab_parallel_cross_entropy``; columns are rows of ``weight``.
        smoothing: "torch" or "nemo".
        z_loss: the weight of lse^2.
        softcap: the bound of the logits.
        ignore_index: the target of rows without a loss.
        vocab_size: V, if the weights have more rows in total, or not equally many on all ranks.
        vocab_start: the vocabulary index of the first row of ``weight``.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [...] in float32, or float64 for float64, equal on all ranks.

    Raises:
        ShapeError: the tensors do not fit together, or are not this rank's part of the vocabulary.
        ConfigError: an option out of range.
        BackendError: ``backend`` cannot run on ``x``.
    """
    _check(x, weight, bias, chunk_size)
    check_one_device(x=x, weight=weight, target=target, bias=bias)
    check_target(target, _whole_rows(x, tp_group, sequence_parallel), "x")
    num_columns = weight.shape[0]
    part = part_of_rank(num_columns, tp_group, vocab_size, vocab_start, softcap, ignore_index)
    terms = terms_of(label_smoothing, smoothing, z_loss, part.vocab_size)
    steps = FUSION.path(_Logits(x.device, x.dtype, target.numel() * num_columns), backend)
    enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    inputs = (as_rows(enter(x, tp_group)), weight, bias, chunk_size or _CHUNK_SIZE)
    return in_shape(loss_of_parts(steps, inputs, target.reshape(-1), tp_group, part, terms), target.shape)


def _whole_rows(x: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> torch.Size:
    """The leading dimensions of the unsplit ``x``. Raises ShapeError if ``x`` has one dimension and cannot be split."""
    if not sequence_parallel:
        return x.shape[:-1]
    if x.dim() < 2:
        raise ShapeError(f"with sequence_parallel, x must be [S/tp, ..., H]; got {list(x.shape)}; add a dimension")
    return torch.Size((x.shape[0] * (1 if tp_group is None else tp_group.size()), *x.shape[1:-1]))


class _Logits(NamedTuple):
    """A stand-in for the logits, which are never stored, for choosing a path."""

    device: torch.device
    dtype: torch.dtype
    size: int

    def numel(self) -> int:
        return self.size


def _triton_statistics(*inputs: object) -> Tensor:
    from megalith.fusions.cross_entropy.kernels.linear import STEPS

    return STEPS.statistics(*inputs)


def _triton_loss(*inputs: object) -> Tensor:
    from megalith.fusions.cross_entropy.kernels.linear import STEPS

    return STEPS.loss(*inputs)


_PATHS: Mapping[Backend, Steps] = {
    "triton": Steps(_triton_statistics, _triton_loss),
    "compile": Steps(compiled(reference.statistics), compiled(reference.loss)),
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("linear_cross_entropy", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None) -> None:
    check_floating(x=x, weight=weight, bias=bias)
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[-1] != x.shape[-1]:
        raise ShapeError(
            f"x must be [..., H] and weight [V/tp, H] with the same H; got {list(x.shape)} and {list(weight.shape)}"
        )
    check_shape("bias", bias, weight.shape[:1], "one for each row of weight")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.dtype != x.dtype:
            raise ShapeError(f"{name} must be {x.dtype}, like x; got {given.dtype}; cast one of them")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size must be 1 token or more, or None; got {chunk_size}")
