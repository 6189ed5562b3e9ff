"""The matrix product of linear layers for models that generate or are evaluated: torch's, or a faster form of it.

    y = x W^T + b,    y[:, block] = x W[block]^T + b[block]

Few float32 rows on a CPU with AVX2 and no AVX-512: MKL computes the product of one row on one thread, and of 2 to 32
rows several times slower than it reads the weight. As a batch of products of 128 outputs each, all threads take part
and a block's weights stay in their cache. The speed-up over torch's product, with two threads and torch 2.13, for 1, 4
and 32 rows:

    weight [out, in]      1     4    32
    [2816, 512]         1.2   2.7   1.7
    [768, 3072]         2.1   2.3   1.9
    [4096, 4096]        1.8   2.9   1.9
    [32000, 2048]       1.6   3.7   2.8

16 bits on such a CPU, which has no instructions for them: torch's own product takes 5 to 7 times as long as float32's.
Widened to float32 some outputs at a time, summed there and rounded once, 8, 32 and 128 rows in bfloat16 take less:

    weight [out, in]      8    32   128
    [2816, 512]         1.3   2.2   4.2
    [768, 3072]         1.0   2.5   4.3
    [4096, 4096]        1.3   3.1   4.9
    [32000, 2048]       1.4   3.4   5.0

With AVX-512, where none of this has been measured, torch's own product is taken.
"""

import torch
from torch import Tensor, nn

from megalith.torch_compat import multiplies_natively

__all__ = ["inference_linear"]

_MOST_ROWS = 32
_BLOCK = 128
_SMALLEST_WEIGHT = 2**18  # with fewer numbers the calls take longer than the product
_FEWEST_WIDENED = 8  # rows; the weight is widened for each product anew
_MOST_WIDENED = 2**20  # numbers of a weight in float32 at once, or one block: 4 MiB, which allocators keep


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] times the transpose of ``weight`` [out, in], plus ``bias`` [out] -> [..., out], contiguous."""
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
    """Whether the processor has AVX2 alone, and the operands are such that torch takes them without casts."""
    return (
        x.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.numel() > 0
        and weight.dtype == x.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and not torch.is_autocast_enabled("cpu")  # which casts to bfloat16, and keeps casts of whole weights alone
    )
