"""AdamW over many tensors in one launch: weights, moments, and the copy of the weights that the model computes with.

    g = scale * grad          m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = (1 - lr * decay) w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)          param = nearest(w)

Loshchilov and Hutter 2017, "Decoupled Weight Decay Regularization", arXiv:1711.05101. w are the float32 master weights,
or the params themselves without masters.

Lower bound: 30 bytes per bfloat16 parameter with float32 gradients and masters (4 + 12 read, 12 + 2 written), 28 bytes
per float32 parameter without masters. Not differentiable.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.adamw.formulas import Operands, aten, reference
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.registry import registered
from megalith.torch_compat.tensors import is_capturing

__all__ = ["FUSION", "fused_adamw_"]

Update = Callable[..., None]


def fused_adamw_(
    params: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float,
    step: int,
    grad_scale: Tensor | None = None,
    found_nonfinite: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Updates ``params``, ``masters``, ``exp_avgs`` and ``exp_avg_sqs`` in place, without a host sync.

    Every list has one tensor per parameter, in its shape. A list has a single dtype, and all tensors are on one device.

    Args:
        params: contiguous; float32 or float64, or with masters any floating-point dtype.
        masters: the weights to update, in float32 or float64, which are then rounded to ``params``; None: params.
        grads: floating point; may be strided.
        exp_avgs: first moments, contiguous, in the dtype of the weights; zeros before the first step.
        exp_avg_sqs: second moments, likewise. In 16 bits they would never change, as 0.1 % of them rounds to nothing.
        lr: the learning rate, which also multiplies the weight decay.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay.
        step: the number of this update, from 1; do not count updates skipped by ``found_nonfinite``.
        grad_scale: one floating-point value on the device: multiplies gradients, to clip them or to undo a loss scale.
        found_nonfinite: one value on the device: unless it is 0, nothing is written.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Raises:
        ShapeError: tensors do not fit together, or a list has several dtypes.
        ConfigError: a setting is out of range, or called during CUDA graph capture, which would freeze step and lr.
        BackendError: ``backend`` cannot run on the weights.
    """
    weights, copies = (params, []) if masters is None else (masters, params)
    _check_settings(lr, betas, eps, weight_decay, step)
    if is_capturing():
        raise ConfigError(
            f"fused_adamw_ must not be captured in a CUDA graph: every replay would repeat step {step} with learning "
            f"rate {lr}; capture forward and backward only, and update outside the graph"
        )
    _check_tensors(params, masters, grads, exp_avgs, exp_avg_sqs, grad_scale, found_nonfinite)
    if not weights:
        return
    update = FUSION.path(weights[0], backend)
    with torch.no_grad():
        scale = None if grad_scale is None else grad_scale.to(weights[0].dtype).reshape(())
        stop = None if found_nonfinite is None else found_nonfinite.reshape(()).ne(0).float()
        lists = [list(tensors) for tensors in (weights, copies, grads, exp_avgs, exp_avg_sqs)]
        update(*lists, [lr, *betas, eps, weight_decay, float(step)], scale, stop)


def _triton(*operands: Unpack[Operands]) -> None:
    from megalith.fusions.adamw.kernels.adamw import op

    op(*operands)


_PATHS: Mapping[Backend, Update] = {"triton": _triton, "aten": aten, "reference": reference}
FUSION = registered(Fusion("adamw", _PATHS, defaults={"cuda": ("triton",), "cpu": ("aten",)}))


def _check_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> None:
    for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0.0:
            raise ConfigError(f"{name} must be 0 or more; got {value}")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas must be two numbers in [0, 1); got {betas}")
    if step < 1:
        raise ConfigError(f"step must be the number of this update, counted from 1; got {step}")


def _check_tensors(
    params: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_nonfinite: Tensor | None,
) -> None:
    written = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if masters is not None:
        written["masters"] = masters
    for name, tensors in {**written, "grads": grads}.items():
        _check_list(name, tensors, params)
        for i, tensor in enumerate(tensors if name in written else ()):
            if not tensor.is_contiguous():
                raise ShapeError(
                    f"{name}[{i}] must be contiguous, because it is updated in place as flat memory; got strides "
                    f"{tensor.stride()} for shape {list(tensor.shape)}; store it as tensor.contiguous()"
                )
    if params:
        weights = params if masters is None else masters
        _check_dtypes(weights[0].dtype, masters is None, {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs})
    for name, scalar in {"grad_scale": grad_scale, "found_nonfinite": found_nonfinite}.items():
        if scalar is not None and params and (scalar.numel() != 1 or scalar.device != params[0].device):
            raise ShapeError(
                f"{name} must have one element and be on {params[0].device}, like params; "
                f"got shape {list(scalar.shape)} on {scalar.device}"
            )


def _check_list(name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    if len(tensors) != len(params):
        raise ShapeError(f"{name} must have a tensor for each of the {len(params)} params; got {len(tensors)}")
    for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        if tensor.shape != param.shape:
            raise ShapeError(f"{name}[{i}] must be {list(param.shape)}, like params[{i}]; got {list(tensor.shape)}")
        if tensor.device != params[0].device:
            raise ShapeError(f"{name}[{i}] must be on {params[0].device}, like params[0]; got {tensor.device}")
        if tensor.dtype != tensors[0].dtype or not tensor.is_floating_point():
            raise ShapeError(
                f"{name} must all have the same floating-point dtype; got {tensor.dtype} for {name}[{i}] and "
                f"{tensors[0].dtype} for {name}[0]; call fused_adamw_ once per dtype"
            )


def _check_dtypes(weights: torch.dtype, without_masters: bool, moments: Mapping[str, Sequence[Tensor]]) -> None:
    if weights not in (torch.float32, torch.float64):
        name = "params" if without_masters else "masters"
        way_out = "; pass float32 masters, otherwise small updates are lost" if without_masters else ""
        raise ShapeError(f"{name} must be float32 or float64; got {weights}{way_out}")
    for name, tensors in moments.items():
        if tensors[0].dtype != weights:
            raise ShapeError(f"{name} must be {weights}, like the weights; got {tensors[0].dtype}")
