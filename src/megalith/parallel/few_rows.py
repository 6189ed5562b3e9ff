"""The matrix product of linear layers for models that generate: torch's, or its transpose where that is faster.

    y = x W^T + b = (W x^T + b)^T

On a CPU with AVX2 and no AVX-512, MKL takes up to three times as long for the first form as for the second, of 2 to 32
float32 rows and a weight with more outputs than inputs: 1.2 times with 8 rows and [1408, 512], 1.8 times with
[32000, 512] (torch 2.13, one thread). With AVX-512, and in bfloat16, no form was faster on every machine.
"""

import torch
from torch import Tensor, nn

__all__ = ["linear_of_few_rows"]

_MOST_ROWS = 32


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] times the transpose of ``weight`` [out, in], plus ``bias`` [out] -> [..., out], contiguous."""
    num_rows = x.shape[:-1].numel()
    if not (1 < num_rows <= _MOST_ROWS and weight.shape[0] > weight.shape[1] and _transposing_pays(x)):
        return nn.functional.linear(x, weight, bias)
    columns = x.reshape(num_rows, -1).t()  # [in, rows]
    y = weight @ columns if bias is None else torch.addmm(bias.unsqueeze(1), weight, columns)  # [out, rows]
    return y.t().contiguous().view(*x.shape[:-1], -1)


def _transposing_pays(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and torch.backends.mkl.is_available()
    )
