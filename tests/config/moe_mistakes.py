"""Mistakes in a mixture of experts and its router."""

from typing import Any

from tests.config.mistake import Mistake

__all__ = ["MOE_MISTAKES"]

MOE: dict[str, Any] = {"model.moe.num_experts": 8}
ROUTER = "model.moe.router"
SINKHORN, QUANTILE = ({**MOE, f"{ROUTER}.selection": name} for name in ("sinkhorn", "quantile"))
CAPACITY = {**MOE, "model.moe.capacity.factor": 1.5, "model.moe.capacity.pad": True}
GROUPS = {**MOE, f"{ROUTER}.num_groups": 4}
FLEX = {**MOE, "parallel.dispatch.method": "flex", "precision.dtype": "bfloat16"}
SYMMETRIC = {**MOE, "parallel.dispatch.method": "symmetric"}

MOE_MISTAKES = [
    Mistake({**MOE, "model.moe.top_k": 9}, r"model.moe.top_k \(9\) must be at most .* \(8\); use model.moe.top_k=8"),
    Mistake({**MOE, "model.moe.top_k": 1}, r"needs model.moe.router.pre_softmax=true.*; use .*pre_softmax=true"),
    Mistake({**GROUPS, f"{ROUTER}.group_topk": 5}, r"num_groups \(4\) and .*group_topk \(5\) must both be set.*; use"),
    Mistake(
        {**GROUPS, f"{ROUTER}.group_topk": 2, "model.moe.top_k": 3}, r"without it .*group_topk must divide .*; use"
    ),
    Mistake(
        {**GROUPS, f"{ROUTER}.group_topk": 2, f"{ROUTER}.group_score_topk": 3},
        r"group_score_topk \(3\) must be at most the number of experts per group",
    ),
    Mistake(
        {**MOE, f"{ROUTER}.group_score_topk": 1}, r"group_score_topk \(1\) has no effect without .*num_groups; use"
    ),
    Mistake(
        {**QUANTILE, "model.moe.top_k": 8}, r"selection=quantile needs model.moe.top_k \(8\) to be less than .*; use"
    ),
    Mistake(
        {**SINKHORN, f"{ROUTER}.score_function": "sigmoid"}, r"selection=sinkhorn computes its own weights, .*; use"
    ),
    Mistake({**SINKHORN, f"{ROUTER}.pre_softmax": True}, r"selection=sinkhorn computes its own weights, .*; use"),
    Mistake(
        {**SINKHORN, f"{ROUTER}.global_balance": 0.1}, r"balances the load by itself; remove .*global_balance; use"
    ),
    Mistake(
        {**QUANTILE, f"{ROUTER}.score_function": "sigmoid", f"{ROUTER}.expert_bias_update_rate": 0.0},
        r"balances the load by itself; remove .*expert_bias_update_rate; use .*expert_bias_update_rate=null",
    ),
    Mistake(
        {**QUANTILE, f"{ROUTER}.num_groups": 4, f"{ROUTER}.group_topk": 2, f"{ROUTER}.group_score_topk": 1},
        r"balances the load by itself; remove .*num_groups; use .*num_groups=null, .*group_score_topk=null",
    ),
    Mistake(
        {**QUANTILE, "model.moe.capacity.factor": 1.0}, r"model.moe.capacity needs .*selection=top_k; got quantile"
    ),
    Mistake(
        {**MOE, f"{ROUTER}.expert_bias_update_rate": 0.1}, r"has no effect with .*score_function=softmax, only with"
    ),
    Mistake({**MOE, f"{ROUTER}.quantile_decay": 0.5}, r"quantile_decay \(0.5\) has no effect with .*selection=top_k"),
    Mistake(
        {**MOE, "model.moe.shared_ffn_hidden_size": 6, "parallel.tensor": 4, "parallel.sequence": True},
        r"shared_ffn_hidden_size \(6\) must be divisible by parallel.tensor \(4\); use .*shared_ffn_hidden_size=8",
        4,
    ),
    Mistake({**MOE, "model.moe.num_experts": 6, "parallel.expert": 4}, r"num_experts \(6\) must be divisible by .*", 4),
    Mistake(
        {**MOE, "parallel.expert": 2, "parallel.expert_tensor": 4},
        r"expert \(2\) x parallel.expert_tensor \(4\) must divide the number of ranks of a pipeline stage \(4\)",
        4,
    ),
    Mistake(
        {**FLEX, "parallel.expert": 2},
        r"method=flex is experimental \(DeepEP.*; use experimental=\[deep_ep\]",
        2,
    ),
    Mistake(
        {
            **FLEX,
            "experimental": ["deep_ep"],
            "parallel.expert": 2,
            "parallel.expert_tensor": 2,
        },
        r"method=flex needs parallel.expert_tensor=1; got 2 ranks that share each expert; use",
        4,
    ),
    Mistake(
        {**FLEX, "experimental": ["deep_ep"], "parallel.expert": 2, "precision.dtype": "float32"},
        r"method=flex needs precision.dtype=bfloat16, the only dtype in which DeepEP combines; got float32; use",
        2,
    ),
    Mistake(
        {**SYMMETRIC, "parallel.expert": 2},
        r"method=symmetric is experimental \(dispatch and combine through torch's symmetric memory.*; use "
        r"experimental=\[symmetric_memory\]",
        2,
    ),
    Mistake(
        {
            **SYMMETRIC,
            "experimental": ["symmetric_memory"],
            "parallel.expert": 2,
            "parallel.expert_tensor": 2,
        },
        r"method=symmetric needs parallel.expert_tensor=1; got 2 ranks that share each expert; use",
        4,
    ),
    Mistake(
        {
            **SYMMETRIC,
            "experimental": ["symmetric_memory"],
            "model.moe.num_experts": 64,
            "parallel.expert": 2,
        },
        r"method=symmetric supports at most 16 ranks of parallel.expert with 16 experts each, the limit of torch's "
        r"kernels; got 2 ranks with 32 experts each; use parallel.expert=4",
        4,
    ),
    Mistake(
        {
            **SYMMETRIC,
            "experimental": ["symmetric_memory"],
            "parallel.expert": 2,
            "model.moe.capacity.factor": 1.5,
            "model.moe.capacity.pad": True,
        },
        r"capacity.pad=true needs .*method=all_to_all; got symmetric; use",
        2,
    ),
    Mistake({"parallel.expert": 2}, r"parallel.expert \(2\) has no effect without model.moe; use", 2),
    Mistake(
        {**CAPACITY, "parallel.expert": 2, "parallel.dispatch.method": "all_gather"},
        r"capacity.pad=true needs .*method=all_to_all; got all_gather",
        2,
    ),
    Mistake(
        {**CAPACITY, "parallel.dispatch.max_rows": 2.0}, r"max_rows \(2.0\) has no effect with .*capacity.pad=true"
    ),
    Mistake({**MOE, "parallel.tensor": 2}, r"with parallel.tensor=2 needs parallel.sequence=true", 2),
    # of a token's rows, rank 0 of 1 computes all; of 2, at most all, which is twice an even share; of 4, with two of
    # six experts chosen, at most a third, which is 4/3 of an even share
    Mistake(
        {**MOE, "parallel.dispatch.max_rows": 1.0}, r"max_rows \(1.0\) has no effect: .*expert=1 .* at most 1 times"
    ),
    Mistake(
        {**MOE, "parallel.expert": 2, "parallel.dispatch.max_rows": 2.0}, r"max_rows \(2.0\) .* at most 2 times", 2
    ),
    Mistake(
        {**MOE, "model.moe.top_k": 6, "parallel.expert": 4, "parallel.dispatch.max_rows": 1.34},
        r"max_rows \(1.34\) .*top_k=6 of 8 experts, .* at most 1.333 times the rows of a balanced load; it must",
        4,
    ),
    Mistake(
        {**MOE, "parallel.dispatch.method": "all_gather"},
        r"method=all_gather has no effect with parallel.expert=1 and one rank per expert; use .*method=null",
    ),
    Mistake(
        {**MOE, "model.moe.capacity.factor": 4.0},
        r"capacity.factor \(4.0\) drops nothing: .* = 4 or more, an expert has room for every token; it must be "
        r"smaller, or",
    ),
    Mistake(
        {
            **MOE,
            "model.moe.capacity.factor": 4.0,
            "model.moe.capacity.pad": True,
            "model.moe.capacity.drop": "position",
        },
        r"drop=position has no effect with .*factor \(4.0\), which drops nothing: .* = 4 or more, .*; use .*drop=null",
    ),
    Mistake(
        {**GROUPS, f"{ROUTER}.group_topk": 4, f"{ROUTER}.group_score_topk": 2},
        r"num_groups \(4\) has no effect with .*group_topk \(4\) and .*: a token may choose from all 4 groups; use "
        r"model.moe.router.num_groups=null, .*group_topk=null, .*group_score_topk=null",
    ),
    Mistake(
        {**GROUPS, f"{ROUTER}.group_topk": 2},
        r"num_groups \(4\) has no effect .*: groups are ranked by their best expert only, and the best 2 .*; use",
    ),
    Mistake(
        {**MOE, "model.moe.top_k": 8, f"{ROUTER}.selection": "round_robin"},
        r"selection=round_robin has no effect with model.moe.top_k \(8\) equal to .*; use .*selection=null",
    ),
    Mistake(
        {**SINKHORN, "model.moe.top_k": 8}, r"selection=sinkhorn has no effect with .*top_k \(8\) equal to .*; use"
    ),
    Mistake(
        {**MOE, "model.moe.top_k": 8, f"{ROUTER}.sequence_balance": 0.1},
        r"sequence_balance has no effect with model.moe.top_k \(8\) equal to .*num_experts: .*; use",
    ),
    Mistake(
        {
            **MOE,
            "model.moe.top_k": 8,
            f"{ROUTER}.score_function": "sigmoid",
            f"{ROUTER}.expert_bias_update_rate": 0.1,
        },
        r"expert_bias_update_rate has no effect with model.moe.top_k \(8\) equal to .*num_experts: .*; use",
    ),
    Mistake(
        {**MOE, "model.moe.layers": [*[False] * 9, True]},
        r"moe.layers puts experts in none of the 4 layers, so model.moe has no effect; use model.moe.layers=null",
    ),
]
