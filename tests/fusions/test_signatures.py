"""Sizes of the signatures in ``fusions``: operands are one named record, and options are keyword arguments."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megalith import fusions

ROOM = Path(fusions.__file__).parent
MOST_ARGUMENTS, MOST_OF_A_KERNEL = 8, 16

# file:function -> its number of arguments, and whose signature it is or why it has so many
WIDE_FUNCTIONS: dict[str, tuple[int, str]] = {
    "adamw/adamw.py:fused_adamw_": (13, "as torch._fused_adamw_: lists, settings, grad_scale, found_inf"),
    "attention/attention.py:attention_gradients": (12, "ours: what backward has, and fused_attention's options"),
    "attention/attention.py:fused_attention": (10, "ours: options by name, as flash-attn's flash_attn_func"),
    "attention/products_for_cpu.py:gradients_by_products": (9, "ours: what backward has"),
    "cross_entropy/linear.py:fused_linear_cross_entropy": (15, "Liger's, and Megatron's vocabulary-parallel group"),
    "cross_entropy/vocab_parallel.py:fused_vocab_parallel_cross_entropy": (11, "Megatron's, and Liger's options"),
    "gated/glu.py:glu": (9, "ours: by name what Megatron's functions of gated units do"),
    "gated/glu.py:glu_back": (9, "dy, and the arguments of glu"),
    "norm/add_norm.py:fused_add_norm": (10, "ours: options by name, as flash-attn's layer_norm_fn"),
    "rope/mla_rope.py:ApplyMLARotaryEmbKV.forward": (12, "Megatron's, by position"),
    "rope/mla_rope.py:ApplyMLARotaryEmbQ.forward": (10, "Megatron's, by position"),
    "rope/mla_rope.py:fused_apply_mla_rope_for_kv": (13, "Megatron's"),
    "rope/mla_rope.py:fused_apply_mla_rope_for_q": (12, "Megatron's"),
    "rope/mla_rope.py:fused_mla_rope_inplace": (13, "Megatron's"),
    "rope/mla_rope.py:fused_mla_rope_kv_split": (14, "Megatron's"),
    "rope/mla_rope.py:fused_mla_rope_out_of_place": (13, "Megatron's"),
    "rope/rope.py:fused_rope": (14, "ours: by name the layouts of Megatron and transformers"),
    "rope/tables.py:yarn_cos_sin": (11, "Megatron's YarnRotaryEmbedding"),
    "rope/tables.py:yarn_rope_frequencies": (9, "Megatron's YarnRotaryEmbedding"),
    "routing/topk_router.py:fused_topk_router": (10, "ours: by name the options of Megatron's routers"),
    "routing/topk_router.py:topk_routing_with_score_function": (9, "Megatron's"),
}
# Separate pointers, strides and sizes, because torch.compile reads the kernels of an operator: ``wrap_triton`` explains
# why they cannot be records. file:kernel -> its number of arguments
WIDE_KERNELS: dict[str, int] = {
    "attention/kernels/attention.py:_forward_kernel": 32,
    "attention/kernels/attention_backward.py:_keys_kernel": 37,
    "attention/kernels/attention_backward.py:_queries_kernel": 36,
    "experts/kernels/row_map.py:_place_kernel": 17,  # its number of tiles, counted in the kernel, spills on sm_80
    "gated/kernels/glu.py:_backward_kernel": 24,
    "norm/kernels/norm.py:backward_kernel": 31,
    "norm/kernels/norm.py:forward_kernel": 24,
    "norm/kernels/norm.py:wide_forward_kernel": 22,
    "quantization/kernels/quantize.py:_quantize_kernel": 22,
    "rope/kernels/mla_rope.py:_backward_kernel": 32,
    "rope/kernels/mla_rope.py:_forward_kernel": 31,
    "rope/kernels/rope.py:_norm_back_kernel": 35,
    "rope/kernels/rope.py:_rotate_kernel": 40,
    "softmax/kernels/softmax.py:_forward_kernel": 19,
    "softmax/kernels/softmax.py:_wide_forward_kernel": 19,
}


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function in ``node``, including methods and inner functions, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        inside = f"{name}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
        if isinstance(child, ast.FunctionDef):
            yield inside.lstrip("."), child
        yield from functions(child, inside)


def num_arguments(function: ast.FunctionDef) -> int:
    """The number of arguments to pass: the ``*operands`` of a record count as one, ``self`` and ``cls`` not at all."""
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + sum(map(bool, (given.vararg, given.kwarg)))


def is_compiled_by_triton(function: ast.FunctionDef) -> bool:
    return any(re.match(r"(triton\.)?jit\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def wider_than(most: int, *, kernels: bool) -> dict[str, int]:
    return {
        f"{file.relative_to(ROOM).as_posix()}:{name}": num_arguments(function)
        for file in sorted(ROOM.rglob("*.py"))
        for name, function in functions(ast.parse(file.read_text("utf-8")))
        if is_compiled_by_triton(function) is kernels and num_arguments(function) > most
    }


def test_functions_take_at_most_eight_arguments_but_for_those_listed():
    listed = {name: number for name, (number, _) in WIDE_FUNCTIONS.items()}
    assert wider_than(MOST_ARGUMENTS, kernels=False) == listed


def test_kernels_take_at_most_sixteen_arguments_but_for_those_listed():
    assert wider_than(MOST_OF_A_KERNEL, kernels=True) == WIDE_KERNELS


def test_a_kernel_that_is_listed_is_launched_and_not_called_by_another():
    # functions that kernels call can take a tuple, since torch.compile never sees them
    for name in WIDE_KERNELS:
        file, kernel = name.split(":")
        launchers = [other.read_text("utf-8") for other in (ROOM / file).parent.glob("*.py")]
        assert any(f"wrap_triton({kernel})" in launcher for launcher in launchers), name
