"""Compares two checkouts bit for bit: digests of the results and gradients of every operation, on each path and dtype.

    PYTHONPATH=OLD:OLD/src python tests/fusions/digests.py record old.jsonl
    PYTHONPATH=NEW:NEW/src python tests/fusions/digests.py record new.jsonl
    python tests/fusions/digests.py compare old.jsonl new.jsonl

``record`` runs the cases of the checkout on ``PYTHONPATH``, then public functions that no case calls. ``--paths``
selects paths: ``compile`` takes minutes, as it builds each operation in each dtype. Entries have digests of the inputs
too, so that a changed case is not mistaken for a changed formula.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when megalith is imported

from megalith import fusions
from tests.fusions.harness import Case, all_cases, first_of_each_operation

Digests = dict[str, str]
Compute = Callable[[], Digests]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PATHS = ("default", "triton", "compile", "aten", "blocked", "reference")


def digest(x: Tensor) -> str:
    flat = x.detach().cpu().contiguous().flatten()
    bits = flat.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode() + bits).hexdigest()[:16]


def of_case(case: Case, path: str, dtype: torch.dtype, num_rows: int) -> Digests:
    """Digests of inputs, results and gradients."""
    width = 127 if 127 in case.widths else case.widths[-1]
    inputs = case.make(num_rows, width, dtype, "cpu")
    backend: Any = None if path == "default" else path
    found = {f"input {name}": digest(x) for name, x in inputs.items() if x is not None}
    results = case.run(inputs, backend, case.upstream(inputs, backend))
    return found | {name: digest(y) for name, y in results.items()}


def of_cases(paths: list[str]) -> Iterator[tuple[str, Compute]]:
    firsts = {str(case) for case in first_of_each_operation()}
    for case in all_cases():
        for path in paths:
            if path not in ("default", *case.fusion.paths) or (path == "compile" and str(case) not in firsts):
                continue
            for dtype in (*case.dtypes, *([torch.float64] if path in ("default", "reference") else [])):
                for num_rows in sizes(case, path):
                    yield f"{case} | {path} | {dtype} | {num_rows}", partial(of_case, case, path, dtype, num_rows)


def sizes(case: Case, path: str) -> tuple[int, ...]:
    """Numbers of rows: few where a case is slow, otherwise enough for several blocks in most operations."""
    several_blocks = 64 if "attention" in str(case) else 1100
    return (5, several_blocks) if path in ("aten", "blocked", "reference") else (3,)


def attempted(compute: Compute) -> Digests:
    try:
        return compute()
    except Exception as error:  # a refusal is a result too
        return {"raises": type(error).__name__}


def of_doors() -> Iterator[tuple[str, Compute]]:
    """Public functions with Megatron's names, by default and through their own backward."""
    for dtype in DTYPES:
        for name, (compute, *shapes) in DOORS.items():
            yield f"{name} | {dtype}", partial(of_call, compute, shapes, dtype)


def of_call(compute: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Digests:
    torch.manual_seed(7)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    values = compute(*inputs)
    results = [y for y in (values if isinstance(values, tuple | list) else [values]) if isinstance(y, Tensor)]
    found = {str(number): digest(y) for number, y in enumerate(results)}
    roots = [y for y in results if y.requires_grad]
    if roots:
        upstream = [torch.randn(y.shape).to(y.dtype) for y in roots]
        gradients = torch.autograd.grad(roots, inputs, upstream, allow_unused=True)
        found |= {f"d{number}": digest(g) for number, g in enumerate(gradients) if g is not None}
    return found


ROWS, GATED, HALF, WEIGHTS = (6, 10), (6, 20), (6, 10), (6, 1)
SCORES = (2, 3, 8, 8)
DOORS: dict[str, tuple[Any, ...]] = {
    "bias_swiglu_impl": (fusions.bias_swiglu_impl, GATED, (20,)),
    "bias_swiglu_impl, float8": (lambda x, b: fusions.bias_swiglu_impl(x, b, True, True), GATED, (20,)),
    "weighted_bias_swiglu_impl": (lambda x, w: fusions.weighted_bias_swiglu_impl(x, None, w), GATED, WEIGHTS),
    "swiglu": (fusions.swiglu, GATED),
    "swiglu_back": (fusions.swiglu_back, HALF, GATED),
    "bias_swiglu": (fusions.bias_swiglu, GATED, (20,)),
    "bias_swiglu_back": (fusions.bias_swiglu_back, HALF, GATED, (20,)),
    "weighted_swiglu": (fusions.weighted_swiglu, GATED, WEIGHTS),
    "weighted_swiglu_back": (fusions.weighted_swiglu_back, HALF, GATED, WEIGHTS),
    "SwiGLUFunction": (fusions.SwiGLUFunction.apply, GATED),
    "BiasSwiGLUFunction": (lambda x, b: fusions.BiasSwiGLUFunction.apply(x, b, False, False), GATED, (20,)),
    "WeightedSwiGLUFunction": (lambda x, w: fusions.WeightedSwiGLUFunction.apply(x, w, False), GATED, WEIGHTS),
    "geglu": (fusions.geglu, GATED),
    "geglu_back": (fusions.geglu_back, HALF, GATED),
    "bias_geglu": (fusions.bias_geglu, (20,), GATED),
    "bias_geglu_back": (fusions.bias_geglu_back, HALF, GATED, (20,)),
    "bias_geglu_impl": (fusions.bias_geglu_impl, GATED, (20,)),
    "quick_gelu": (fusions.quick_gelu, ROWS),
    "quick_geglu": (lambda x: fusions.quick_geglu(x, 1.0), GATED),
    "quick_geglu_back": (lambda g, x: fusions.quick_geglu_back(g, x, 1.0), HALF, GATED),
    "weighted_quick_geglu": (lambda x, w: fusions.weighted_quick_geglu(x, w, 1.0), GATED, WEIGHTS),
    "weighted_quick_geglu_back": (fusions.weighted_quick_geglu_back, HALF, GATED, WEIGHTS),
    "weighted_bias_quick_geglu": (fusions.weighted_bias_quick_geglu, GATED, (20,), WEIGHTS),
    "weighted_bias_quick_geglu_back": (fusions.weighted_bias_quick_geglu_back, HALF, GATED, (20,), WEIGHTS),
    "weighted_bias_quick_geglu_impl": (
        lambda x, b, w: fusions.weighted_bias_quick_geglu_impl(x, b, w, False, 1.0, 2.0), GATED, (20,), WEIGHTS,
    ),
    "bias_gelu": (fusions.bias_gelu, (10,), ROWS),
    "bias_gelu_back": (fusions.bias_gelu_back, ROWS, (10,), ROWS),
    "GeLUFunction": (fusions.GeLUFunction.apply, ROWS, (10,)),
    "weighted_squared_relu": (fusions.weighted_squared_relu, ROWS, WEIGHTS),
    "weighted_squared_relu_back": (fusions.weighted_squared_relu_back, ROWS, ROWS, WEIGHTS),
    "WeightedSquaredReLUFunction": (fusions.WeightedSquaredReLUFunction.apply, ROWS, WEIGHTS),
    "glu_back": (lambda g, x: fusions.glu_back(g, x, activation="gelu", clamp=0.5), HALF, GATED),
    "bias_dropout_add_unfused": (
        lambda x, b, r: fusions.bias_dropout_add_unfused(False)((x, b), r, 0.1), ROWS, (10,), ROWS,
    ),
    "bias_dropout_add_fused_inference": (
        lambda x, b, r: fusions.bias_dropout_add_fused_inference((x, b), r, 0.1), ROWS, (10,), ROWS,
    ),
    "get_bias_dropout_add": (
        lambda x, b, r: fusions.get_bias_dropout_add(True, True)((x, b), r, 0.1), ROWS, (10,), ROWS,
    ),
    "ScaledSoftmax": (lambda x: fusions.ScaledSoftmax.apply(x, 0.5), SCORES),
    "ScaledMaskedSoftmax": (
        lambda x: fusions.ScaledMaskedSoftmax.apply(x, torch.ones(2, 1, 8, 8).triu(1).bool(), 0.5), SCORES,
    ),
    "ScaledUpperTriangMaskedSoftmax": (
        lambda x: fusions.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5), (6, 8, 8),
    ),
    "SoftmaxOne": (lambda x: fusions.SoftmaxOne(-1)(x), SCORES),
    "FusedScaleMaskSoftmax": (
        lambda x: fusions.FusedScaleMaskSoftmax(
            False, False, fusions.AttnMaskType.causal, True, None, True, 0.5
        )(x, None),
        SCORES,
    ),
    "FusedLayerNorm": (lambda x: fusions.FusedLayerNorm(None, 10, dtype=x.dtype)(x), ROWS),
    "FusedRMSNorm": (lambda x: fusions.FusedRMSNorm(None, 10, dtype=x.dtype)(x), ROWS),
    "calculate_logits_max": (fusions.calculate_logits_max, ROWS),
    "merge_attention": (
        lambda a, b: fusions.merge_attention(
            a, a.float()[..., 0].permute(1, 2, 0), b, b.float()[..., 1].permute(1, 2, 0)
        ),
        (4, 2, 3, 8), (4, 2, 3, 8),
    ),
    "dequantize": (lambda x: fusions.dequantize(fusions.quantize(x.detach(), "mxfp8")), (64, 64)),
    "rope_frequencies": (lambda: fusions.rope_cos_sin(fusions.rope_frequencies(8), torch.arange(9)),),
    "yarn_cos_sin": (lambda: fusions.yarn_cos_sin(9, 64, scaling_factor=4.0),),
}  # fmt: skip


def record(file: str, paths: list[str]) -> None:
    """Appends a line for each entry that is not yet in ``file``, so that an interrupted run can be continued."""
    torch.set_num_threads(1)  # sums over blocks depend on the number of threads
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    known = entries(file) if os.path.exists(file) else {}
    with open(file, "a", encoding="utf-8") as stream:
        for name, compute in (*of_cases(paths), *(of_doors() if "default" in paths else ())):
            if name not in known:
                stream.write(json.dumps([name, attempted(compute)]) + "\n")
                stream.flush()


def entries(file: str) -> dict[str, Digests]:
    with open(file, encoding="utf-8") as lines:
        return dict(json.loads(line) for line in lines)


def compare(old: str, new: str) -> int:
    """Returns 0 if both files have the same entries."""
    before, after = entries(old), entries(new)
    differing = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    for name in differing:
        a, b = before.get(name, {}), after.get(name, {})
        what = ", ".join(part for part in sorted(a.keys() | b.keys()) if a.get(part) != b.get(part))
        sys.stdout.write(f"{name}: {what if a and b else 'in one file only'}\n")
    sys.stdout.write(f"{len(before.keys() & after.keys())} entries compared, {len(differing)} differ\n")
    return int(bool(differing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    given = parser.parse_args()
    if given.action == "compare":
        return compare(*given.files)
    record(given.files[0], given.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
