"""Cases of rotary embeddings; a width stands for half a head."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.rope.rope import FUSION, fused_rope
from tests.fusions.harness import Case, Inputs

B, A, G = 2, 3, 2


def head_size(width: int) -> int:
    """2, 14, 128 and 254; and 128 for widths that are not head sizes."""
    return 2 * width if width < 128 else 128


def sections_of(half: int) -> tuple[int, int, int]:
    """The numbers of pairs, out of ``half``, rotated by time, height and width."""
    return half // 4, half // 3, half - half // 4 - half // 3


def inputs(names: tuple[str, ...], partial_rotary: bool, S: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
    D = head_size(width)
    half = D // 4 if partial_rotary else D // 2
    made: Inputs = {"q": torch.randn(S, B, A, D, device=device).to(dtype)}
    if "k" in names:
        made["k"] = torch.randn(S, B, G, D, device=device).to(dtype)
    shape = {"table of each token": (S, B, half), "positions": (9, half), "sections": (9, half)}
    rows = next((shape[name] for name in names if name in shape), (S, half))
    angles = torch.rand(rows, dtype=torch.float64, device=device) * 6.3
    table = torch.promote_types(dtype, torch.float32)
    made |= {"cos": angles.cos().to(table), "sin": angles.sin().to(table)}
    if "positions" in names:
        made["positions"] = torch.randint(0, 9, (S, B), device=device, dtype=torch.int32)
    if "sections" in names:
        made["positions"] = torch.randint(0, 9, (3, S), device=device)
    if "norm" in names:
        made |= {f"{x}_norm_weight": torch.randn(D, device=device).to(dtype) for x in ("q", "k")}
    return made


def formula(
    q: Tensor,
    k: Tensor | None = None,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    layout: str = "neox",
    inverse: bool = False,
    zero_centered: bool = False,
    sections: bool = False,
) -> tuple[Tensor, ...]:
    """Pairs as vectors, each multiplied by its rotation matrix."""
    matrix = torch.stack((cos, sin, -sin, cos) if inverse else (cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    if sections and positions is not None:
        half = cos.shape[-1]
        stream = torch.arange(3, device=cos.device).repeat_interleave(torch.tensor(sections_of(half)).to(cos.device))
        matrix = matrix[positions[stream].t(), torch.arange(half, device=cos.device)]  # [S, R/2]
    elif positions is not None:
        matrix = matrix[positions]
    matrix = matrix.unsqueeze(-4) if matrix.dim() == 5 else matrix[:, None, None]  # [S, 1 or B, 1, R/2, 2, 2]

    def of(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            gain = weight + 1 if zero_centered else weight
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], gain, eps=1e-6)
        half = cos.shape[-1]
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        read_pairs = layout == "interleaved" or (layout == "deepseek" and not inverse)
        write_pairs = layout == "interleaved" or (layout == "deepseek" and inverse)
        rows = rotated.unflatten(-1, (half, 2)) if read_pairs else rotated.unflatten(-1, (2, half)).transpose(-1, -2)
        rotated = (matrix @ rows.unsqueeze(-1)).squeeze(-1)
        rotated = rotated.flatten(-2) if write_pairs else rotated.transpose(-1, -2).flatten(-2)
        return torch.cat((rotated, rest), dim=-1)

    y = of(q, q_norm_weight)
    return (y,) if k is None else (y, of(k, k_norm_weight))


def compute(
    q: Tensor, k: Tensor | None = None, *, cos: Tensor, sin: Tensor, partial_rotary: bool, **options: Any
) -> Any:
    if partial_rotary:
        options["rotary_dim"] = 2 * cos.shape[-1]
    if options.get("sections"):
        options["sections"] = sections_of(cos.shape[-1])
    y, y_k = fused_rope(q, k, cos, sin, **options)
    return y if y_k is None else (y, y_k)


def terms(q: Tensor, k: Tensor | None = None, **_: Any) -> dict[str, int]:
    of_k = {} if k is None else {"dk_norm_weight": k[..., 0].numel()}
    return {"dq_norm_weight": q[..., 0].numel()} | of_k


def case(name: str, *given: str, partial_rotary: bool = False, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(inputs, given, partial_rotary),
        partial(compute, partial_rotary=partial_rotary, **settings),
        partial(formula, **settings),
        terms=terms,
        cancels=("0", "1", "dq", "dk"),  # sums of two terms of either sign
        cost=cost.rope,
        constant=("cos", "sin"),
        shared=("cos", "sin", "positions", "q_norm_weight", "k_norm_weight"),
        widths=(2, 64, 1536) if partial_rotary else (1, 7, 64, 127, 1536),
    )


CASES = [
    case("rope", "k"),
    case("rope of q alone, interleaved, tables of each token", "table of each token", layout="interleaved"),
    case("rope, read in pairs and written in halves, positions", "k", "positions", layout="deepseek"),
    case("rope of half of the features turned back", "k", partial_rotary=True, layout="deepseek", inverse=True),
    case("rope after a norm", "k", "norm"),
    case(
        "rope of half of the features after a zero-centred norm", "k", "norm", "positions",
        partial_rotary=True, layout="interleaved", zero_centered=True,
    ),
    case("rope of three sections", "k", "sections", sections=True),
]  # fmt: skip
