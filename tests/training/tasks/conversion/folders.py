"""Hugging Face model folders as transformers writes them, with a tokenizer."""

from pathlib import Path

from transformers import PreTrainedModel

from megalith.data.tokenizer import train_byte_level_bpe
from tests.models.hf import peers

__all__ = ["ENCODERS", "SHAPES", "write_folder"]

VOCAB = 271  # a prime, one more than the tokenizer has entries

SHAPES = {
    "llama": lambda: peers.llama(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
    "tied llama": lambda: peers.llama(
        vocab_size=VOCAB, max_position_embeddings=24, tie_word_embeddings=True, head_dim=6, intermediate_size=38
    ),
    "llama3 llama": lambda: peers.llama(vocab_size=VOCAB, eos_token_id=0, **peers.scaled("llama3")),
    "yarn llama": lambda: peers.llama(vocab_size=VOCAB, eos_token_id=0, **peers.scaled("yarn, all of its fields")),
    "mistral": lambda: peers.mistral(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0, head_dim=6),
    "qwen2": lambda: peers.qwen2(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
    "qwen3": lambda: peers.qwen3(
        vocab_size=VOCAB, max_position_embeddings=24, tie_word_embeddings=True, num_key_value_heads=1, eos_token_id=0
    ),
    "windowed qwen2": lambda: peers.qwen2(
        vocab_size=VOCAB,
        max_position_embeddings=24,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        eos_token_id=0,
    ),
    "gemma2": lambda: peers.gemma2(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
    "gemma3": lambda: peers.gemma3(
        vocab_size=VOCAB, max_position_embeddings=24, sliding_window_pattern=2, num_hidden_layers=4, eos_token_id=0
    ),
    "mixtral": lambda: peers.mixtral(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
    "qwen2 of experts": lambda: peers.qwen2_moe(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
    "qwen3 of experts": lambda: peers.qwen3_moe(
        vocab_size=VOCAB,
        max_position_embeddings=24,
        num_experts=4,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        eos_token_id=0,
    ),
    "gpt-oss": lambda: peers.gpt_oss(vocab_size=VOCAB, intermediate_size=20, eos_token_id=0),
    "deepseek v3": lambda: peers.deepseek_v3(
        vocab_size=VOCAB, num_hidden_layers=3, kv_lora_rank=12, eos_token_id=0, **peers.scaled("yarn of DeepSeek-V3")
    ),
    "deepseek v2": lambda: peers.deepseek_v2(
        vocab_size=VOCAB,
        kv_lora_rank=12,
        max_position_embeddings=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=3,
        eos_token_id=0,
    ),
    "gpt2": lambda: peers.gpt2(vocab_size=VOCAB, eos_token_id=0),
    "untied gpt2": lambda: peers.gpt2(vocab_size=VOCAB, tie_word_embeddings=False, n_inner=37),
}
# those that do not generate text
ENCODERS = {
    "roformer": lambda: peers.roformer(vocab_size=VOCAB, max_position_embeddings=24, eos_token_id=0),
}


def write_folder(folder: Path, shape: str, dtype: str = "float32", max_shard_size: str = "1GB") -> PreTrainedModel:
    """Writes a model to ``folder``; returns transformers' view of it."""
    theirs = (SHAPES | ENCODERS)[shape]()
    buffers = peers.saved_buffers(theirs)
    theirs = getattr(theirs, {"float32": "float", "bfloat16": "bfloat16", "float64": "double"}[dtype])()
    for name, buffer in buffers.items():  # they load these in float32 whatever the dtype
        owner, _, last = name.rpartition(".")
        setattr(theirs.get_submodule(owner), last, buffer)
    theirs.save_pretrained(folder, max_shard_size=max_shard_size)
    train_byte_level_bpe(["some words to merge, some more words"] * 9, 270).save(folder / "tokenizer.json")
    return theirs.eval()
