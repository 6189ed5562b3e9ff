"""Which paths an operation takes by default, the first that can run; a device that is not listed takes the reference.

cpu    what ``python -m benchmarks.fusions`` found fastest, with a C++ compiler and without one; the end of each page
       of docs/fusions holds the last table
cuda   untuned: our kernels wherever there are some, until a benchmark on a GPU says otherwise
"""

from collections.abc import Mapping, Sequence

from megalith.fusions.paths.names import Backend

__all__ = ["DEFAULT_PATHS"]

DEFAULT_PATHS: Mapping[str, Mapping[str, Sequence[Backend]]] = {
    "aux_loss_scores": {"cuda": ("triton",), "cpu": ("blocked",)},
    "adamw": {"cuda": ("triton",), "cpu": ("aten",)},
    "bias_dropout_add": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "add_norm": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "layer_norm": {"cuda": ("triton",), "cpu": ("aten", "blocked")},
    "rms_norm": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "bias_gelu": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "glu": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "glu_float8": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "indices_to_multihot": {"cuda": ("triton",), "cpu": ("reference",)},
    "multihot_to_indices": {"cuda": ("triton",), "cpu": ("reference",)},
    "attention": {"cuda": ("triton",), "cpu": ("aten",)},
    "grouped_matmul": {"cuda": ("triton",), "cpu": ("aten", "blocked")},
    "masked_softmax": {"cuda": ("triton",), "cpu": ("blocked",)},
    "mla_rope_kv": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "rope": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "pad_routing_map": {"cuda": ("triton",), "cpu": ("blocked",)},
    "quantize": {"cuda": ("triton",), "cpu": ("blocked",)},
    "linear_cross_entropy": {"cuda": ("triton",), "cpu": ("blocked",)},
    "vocab_parallel_cross_entropy": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
    "permute": {"cuda": ("triton",), "cpu": ("blocked",)},
    "row_map": {"cuda": ("triton",), "cpu": ("blocked",)},
    "topk_router": {"cuda": ("triton",), "cpu": ("blocked",)},
    "unpermute": {"cuda": ("triton",), "cpu": ("blocked",)},
    "weighted_squared_relu": {"cuda": ("triton",), "cpu": ("compile", "blocked")},
}
