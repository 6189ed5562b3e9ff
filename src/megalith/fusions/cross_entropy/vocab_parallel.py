"""Cross entropy over a vocabulary that may be split over ranks: one pass each way, and one collective in forward.

    ce   = lse - x_y                        lse = log sum over v of exp(x_v), x = softcap * tanh(logits / softcap)
    loss = (1 - a) ce + a (lse - sum over v of x_v / V) + z lse^2
    dx_v = dloss (p_v (1 + 2 z lse) - (1 - a) [v = y] - a / V)         p = softmax(x), a = label_smoothing, z = z_loss

Each rank reads its logits once, and computes for each row the largest logit and the sum of exponentials, both excluding
the target, and the target's logit; these are gathered. The target is added last, so tiny losses and the target's
gradient have full float32 precision (``cross_entropy.formulas``). Smoothing: Szegedy et al. 2015, arXiv:1512.00567;
z-loss: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311; softcap: Gemma Team 2024, "Gemma 2", arXiv:2408.00118.

T tokens (leading dimensions flattened), V vocabulary. Saved for backward: the logits themselves, 12T bytes of
statistics and the targets. Lower bound: forward TV/tp elements, backward 2TV/tp: 6 bytes per logit in 16 bits.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.errors import ShapeError
from megalith.fusions.core.checks import check_floating, check_one_device
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape
from megalith.fusions.cross_entropy.blocked import blocked, compiled
from megalith.fusions.cross_entropy.formulas import reference
from megalith.fusions.cross_entropy.options import Smoothing, check_target, part_of_rank, terms_of
from megalith.fusions.cross_entropy.steps import Steps, loss_of_parts
from megalith.fusions.cross_entropy.two_collectives import (
    calculate_cross_entropy_loss,
    calculate_gradients,
    calculate_logits_max,
    calculate_predicted_logits,
)

__all__ = [
    "FUSION",
    "calculate_cross_entropy_loss",
    "calculate_gradients",
    "calculate_logits_max",
    "calculate_predicted_logits",
    "fused_vocab_parallel_cross_entropy",
]


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    *,
    label_smoothing: float = 0.0,
    smoothing: Smoothing = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Returns the loss of each token, equal on all ranks of ``tp_group``; no rank holds a whole row of logits.

    Args:
        vocab_parallel_logits: [..., V/tp], this rank's part, floating point; rows may be strided.
        target: int64 [...], vocabulary indices in [0, V). Other values except ``ignore_index`` make the loss and
            gradient NaN instead of raising, because a check would cause a host sync.
        tp_group: the ranks that share the vocabulary; None for one rank.
        label_smoothing: the probability mass taken from the target, in [0, 1].
        smoothing: how it is distributed: "torch", over all V entries, as in torch.nn.functional.cross_entropy; "nemo",
            over the V - 1 other entries, as in Megatron on a single rank.
        z_loss: the weight of lse^2, which keeps logits from drifting; 0 disables it.
        softcap: logits become softcap * tanh(x / softcap); None for no cap.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits; None ignores no row.
        vocab_size: V, if the ranks have more columns in total because of padding, or not equally many; defaults to the
            total number of columns. Padding, at the end, has probability 0 and gradient 0.
        vocab_start: the vocabulary index of the first column; by default that of torch.chunk over V, or of an even
            split of the padded vocabulary.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [...] in float32, or float64 for float64 logits.

    Raises:
        ShapeError: the tensors do not fit together, or are not this rank's part of the vocabulary.
        ConfigError: an option out of range.
        BackendError: ``backend`` cannot run on the logits.
    """
    check_floating(vocab_parallel_logits=vocab_parallel_logits)
    check_one_device(vocab_parallel_logits=vocab_parallel_logits, target=target)
    if vocab_parallel_logits.dim() == 0:
        raise ShapeError("vocab_parallel_logits must be [..., V/tp], one logit per vocabulary entry; got []")
    check_target(target, vocab_parallel_logits.shape[:-1], "vocab_parallel_logits")
    num_columns = vocab_parallel_logits.shape[-1]
    part = part_of_rank(num_columns, tp_group, vocab_size, vocab_start, softcap, ignore_index)
    terms = terms_of(label_smoothing, smoothing, z_loss, part.vocab_size)
    steps = FUSION.path(vocab_parallel_logits, backend)
    loss = loss_of_parts(steps, (as_rows(vocab_parallel_logits),), target.reshape(-1), tp_group, part, terms)
    return in_shape(loss, target.shape)


def _triton_statistics(*inputs: object) -> Tensor:
    from megalith.fusions.cross_entropy.kernels.cross_entropy import STEPS

    return STEPS.statistics(*inputs)


def _triton_loss(*inputs: object) -> Tensor:
    from megalith.fusions.cross_entropy.kernels.cross_entropy import STEPS

    return STEPS.loss(*inputs)


_PATHS: Mapping[Backend, Steps] = {
    "triton": Steps(_triton_statistics, _triton_loss),
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(
    Fusion("vocab_parallel_cross_entropy", _PATHS, defaults={"cuda": ("triton",), "cpu": ("compile", "blocked")})
)
