"""The matrix product of linear layers for generation and evaluation: torch's, or a faster equivalent on some CPUs.

    y = x W^T + b,    y[:, block] = x W[block]^T + b[block]

Few float32 rows on a CPU with AVX2 but without AVX-512: MKL computes the product of one row on a single thread, and
that of 2 to 32 rows several times slower than it can read the weight. A batched product over blocks of 128 outputs
uses all threads and keeps each block's weights in cache. Speed-up over torch's product, with two threads and torch
2.13, for 1, 4 and 32 rows:

    weight [out, in]      1     4    32
    [2816, 512]         1.2   2.7   1.7
    [768, 3072]         2.1   2.3   1.9
    [4096, 4096]        1.8   2.9   1.9
    [32000, 2048]       1.6   3.7   2.8

16-bit dtypes on such a CPU, which has no instructions for them: torch's product takes 5 to 7 times as long as in
float32. Here the weight is converted to float32 a group of outputs at a time, summed in float32 and rounded once.
Speed-up over torch's product in bfloat16, for 8, 32 and 128 rows:

    weight [out, in]      8    32   128
    [2816, 512]         1.3   2.2   4.2
    [768, 3072]         1.0   2.5   4.3
    [4096, 4096]        1.3   3.1   4.9
    [32000, 2048]       1.4   3.4   5.0

With AVX-512, where none of this has been measured, torch's product is used.
"""

import torch
from torch import Tensor, nn

from megalith.torch_compat.tensors import multiplies_natively

__all__ = ["inference_linear"]

_MOST_ROWS = 32
_BLOCK = 128
_SMALLEST_WEIGHT = 2**18  # elements; below this the call overhead exceeds the time of the product
_FEWEST_WIDENED = 8  # rows; the weight is converted again for each product
_MOST_WIDENED = 2**20  # weight elements in float32 at once (at least one block): 4 MiB, which allocators cache


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x [..., in] by the transpose of ``weight`` [out, in] and adds ``bias`` -> [..., out], contiguous."""
    if not torch.compiler.is_compiling() and _is_on_plain_avx2(x, weight, bias):
        num_rows = x.shape[:-1].numel()
        if num_rows >= _FEWEST_WIDENED and _widening_pays(x):
            return _in_float32(x, weight, bias)
        if 0 < num_rows <= _MOST_ROWS and _blocks_pay(x, weight, num_rows):
            return _in_blocks(x, weight, bias, num_rows)
    return nn.functional.linear(x, weight, bias)


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, parts = x.float(), []
    num_outputs = max(1, _MOST_WIDENED // weight.shape[1] // _BLOCK) * _BLOCK
    for first in range(0, weight.shape[0], num_outputs):
        part = slice(first, first + num_outputs)
        part_of_bias = None if bias is None else bias[part].float()
        parts.append(inference_linear(wide, weight[part].float(), part_of_bias).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    num_blocks = weight.shape[0] // _BLOCK
    rows = x.reshape(1, num_rows, -1).expand(num_blocks, -1, -1)
    blocks = weight.view(num_blocks, _BLOCK, -1).transpose(1, 2)  # [out/128, in, 128]
    biases = None if bias is None else bias.view(num_blocks, 1, _BLOCK)
    y = torch.bmm(rows, blocks) if biases is None else torch.baddbmm(biases, rows, blocks)  # [out/128, rows, 128]
    return y.transpose(0, 1).reshape(*x.shape[:-1], -1)


def _widening_pays(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and not multiplies_natively(x.dtype)


def _blocks_pay(x: Tensor, weight: Tensor, num_rows: int) -> bool:
    return (
        weight.shape[0] % _BLOCK == 0
        and weight.numel() >= _SMALLEST_WEIGHT
        and x.dtype == torch.float32
        and (num_rows > 1 or torch.get_num_threads() > 1)
        and torch.backends.mkl.is_available()
    )


def _is_on_plain_avx2(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the CPU has AVX2 but not AVX-512, and the operands need no casts or broadcasting."""
    return (
        x.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.numel() > 0
        and weight.dtype == x.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and not torch.is_autocast_enabled("cpu")  # autocast casts to bfloat16, and caches casts of whole weights only
    )
