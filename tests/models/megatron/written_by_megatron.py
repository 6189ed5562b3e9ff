"""Wrote the folders next to this file, with megatron-core 0.16.0 and torch 2.13.0 on a CPU; kept to write others.

    torchrun --nproc-per-node 2 written_by_megatron.py llama-tp2
    python written_by_megatron.py gpt-tp1
    python written_by_megatron.py windows-tp1     a Llama with norms of queries and keys, and a window in layer 0
    python written_by_megatron.py nemotron-tp1    squared ReLU, biases of q, k and v alone, positions in part and scaled

Megatron needs a GPU for random states, synchronization and its writer processes; this script works around that.
"""

import argparse
import contextlib
import os
import queue
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

LAYERS, HIDDEN, HEADS, FFN, VOCAB, POSITIONS = 2, 16, 4, 24, 48, 32
LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
}
KINDS = {
    "gpt": {},
    "llama": LLAMA,
    "windows": LLAMA | {"qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": 2},
    "nemotron": {
        "kv_channels": 8,
        "squared_relu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
    },
}


class _NoRandomStates:
    def fork(self, *names):
        return contextlib.nullcontext()

    def add(self, *args):
        pass


def _without_gpu():
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args: None
    ones = torch.ones
    torch.ones = lambda *sizes, device=None, **options: ones(*sizes, **options)  # for the window mask
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoRandomStates(), True
    writer, results = filesystem_async.FileSystemWriterAsync, queue.Queue()

    def write_here(transforms, use_msc, rank, buckets, results):
        written = {}
        for number, bucket in enumerate(buckets):
            found, running = queue.Queue(), queue.Queue()
            running.put(number)
            writer.write_preloaded_data(transforms, number, bucket, found, running, True)
            written[number] = found.get()[1]
        results.put(written)

    writer.write_preloaded_data_multiproc = staticmethod(write_here)
    filesystem_async._get_write_results_queue = lambda: results
    filesystem_async._process_memory = lambda: 0


def _arguments(kind):
    """The arguments of Megatron's training script that define the model, and some that do not."""
    common = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": HIDDEN // HEADS,
        "ffn_hidden_size": FFN,
        "swiglu": False,
        "squared_relu": False,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": False,
        "position_embedding_type": "learned_absolute",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "max_position_embeddings": POSITIONS,
        "seq_length": POSITIONS,
        "padded_vocab_size": VOCAB,
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
        "params_dtype": torch.float32,
        "num_experts": None,
        "qk_layernorm": False,
        "window_size": None,
        "window_attn_skip_freq": None,
        "multi_latent_attention": False,
        "activation_func": torch.nn.functional.gelu,
    }
    return argparse.Namespace(**common | KINDS[kind])


def _model(arguments, tp):
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    activation = squared_relu if arguments.squared_relu else torch.nn.functional.gelu
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=arguments.num_query_groups if arguments.group_query_attention else HEADS,
        kv_channels=arguments.kv_channels,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        normalization=arguments.normalization,
        add_bias_linear=arguments.add_bias_linear,
        add_qkv_bias=arguments.add_qkv_bias,
        gated_linear_unit=arguments.swiglu,
        activation_func=torch.nn.functional.silu if arguments.swiglu else activation,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        rotary_interleaved=arguments.rotary_interleaved,
        qk_layernorm=arguments.qk_layernorm,
        window_size=arguments.window_size,
        window_attn_skip_freq=arguments.window_attn_skip_freq,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
        vocab_size=VOCAB,
        max_sequence_length=POSITIONS,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rotary_percent=arguments.rotary_percent,
        rope_scaling=arguments.use_rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide swapped weights
                seed = zlib.crc32(name.encode())
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model.eval()


def main():
    folder = Path(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"} | os.environ
    dist.init_process_group("gloo")
    _without_gpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    kind, tp = folder.name.partition("-")[0], dist.get_world_size()
    parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(7)
    model = _model(_arguments(kind), tp)
    folder.mkdir(exist_ok=True)
    state = {"model": model.sharded_state_dict(), "args": _arguments(kind), "iteration": 12, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))
    tokens = torch.arange(20).view(1, 20) * 7 % VOCAB
    hidden_from = torch.ones(1, 1, 20, 20).triu(1).bool()
    with torch.no_grad():
        parts = model(tokens, torch.arange(20).view(1, 20), hidden_from)
        logits = gather_from_tensor_model_parallel_region(parts.contiguous())
    if dist.get_rank() == 0:
        torch.save({"tokens": tokens, "logits": logits}, folder / "logits.pt")


if __name__ == "__main__":  # Megatron starts new processes
    main()
