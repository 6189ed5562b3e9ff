"""Options of attention, for tests/training/test_model_options.py."""

from typing import Any

DROPS = {"attention_dropout": 0.1}
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
ALL_AT_ONCE = {
    "softmax": "learnable",
    "qk_norm": "LayerNorm",
    "output_gate": True,
    "logit_softcap": 2.0,
    "scale": 0.5,
    "qkv_bias": True,
}


def attention(**options: Any) -> dict[str, Any]:
    # initial weights large enough for scores to differ, and for softcaps and sinks to have an effect
    return {"model": {"attention": options, "init_method_std": 0.2}}


def shared_groups(groups: dict[str, Any]) -> dict[str, Any]:
    """One query group: each rank of tp computes its keys and values."""
    return {**groups, "model": {**groups["model"], "num_query_groups": 1}}


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax off by one": attention(softmax="off_by_one"),
    "learnable sinks": attention(softmax="learnable"),
    "learnable sinks, dropout": {"model": {**attention(softmax="learnable")["model"], **DROPS}},
    "RMSNorm of queries and keys": attention(qk_norm="RMSNorm"),
    "LayerNorm of queries and keys": attention(qk_norm="LayerNorm"),
    "L2 norm of queries and keys": attention(qk_norm="L2"),
    "norms of keys that ranks share": shared_groups(attention(qk_norm="RMSNorm")),
    "output gate": attention(output_gate=True),
    "softcap of the scores": attention(logit_softcap=1.5),
    "scale of the scores": attention(scale=0.7),
    "biases of q, k and v": attention(qkv_bias=True),
    "bias of the output": attention(output_bias=True),
    "attention with everything, packed": {**attention(**ALL_AT_ONCE), "data": PACKED},
    "attention with everything, shared groups, dropout": {
        "model": {**shared_groups(attention(**ALL_AT_ONCE))["model"], **DROPS},
    },
}
