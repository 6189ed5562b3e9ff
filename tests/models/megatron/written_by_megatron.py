"""Wrote the folders beside this file, with megatron-core 0.16.0 and torch 2.13.0 on a CPU; kept to write others.

    torchrun --nproc-per-node 2 written_by_megatron.py llama-tp2
    python written_by_megatron.py gpt-tp1
    python written_by_megatron.py windows-tp1        a Llama with norms of queries and keys and a window in layer 0

Megatron wants a GPU for its random states, for synchronising and for the processes that write; here it does without.
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
    torch.ones = lambda *sizes, device=None, **options: ones(*sizes, **options)  # for the mask of a window
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
    """Those of Megatron's training script that say what the model is, and some that do not."""
    llama, windows = kind != "gpt", kind == "windows"
    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=llama,
        num_query_groups=2 if llama else 1,
        kv_channels=HIDDEN // HEADS,
        ffn_hidden_size=FFN,
        swiglu=llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        norm_epsilon=1e-5,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=llama,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=POSITIONS,
        seq_length=POSITIONS,
        padded_vocab_size=VOCAB,
        bias_gelu_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        params_dtype=torch.float32,
        num_experts=None,
        qk_layernorm=windows,
        window_size=(4, 0) if windows else None,
        window_attn_skip_freq=2 if windows else None,
        multi_latent_attention=False,
        activation_func=torch.nn.functional.gelu,
    )


def _model(kind, tp):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments, llama = _arguments(kind), kind != "gpt"
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2 if llama else HEADS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        normalization=arguments.normalization,
        add_bias_linear=not llama,
        gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
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
        share_embeddings_and_output_weights=not llama,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide where they go
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
    model = _model(kind, tp)
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


if __name__ == "__main__":  # Megatron starts processes anew
    main()
