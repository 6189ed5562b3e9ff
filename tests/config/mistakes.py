"""A valid run, and every kind of mistake in its settings."""

from typing import Any

from tests.config.data_mistakes import DATA_MISTAKES
from tests.config.fp8_mistakes import FP8_MISTAKES
from tests.config.kind_mistakes import KIND_MISTAKES
from tests.config.mistake import Mistake
from tests.config.moe_mistakes import MOE_MISTAKES
from tests.config.option_mistakes import OPTION_MISTAKES

# one GPT per family, with llama's defaults
VALID: dict[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 96, "num_attention_heads": 12, "num_query_groups": 4},
    "data": {"train": "corpus", "seq_length": 64},
    "train": {"steps": 100, "global_batch_size": 24, "micro_batch_size": 2},
    "optim": {"lr": 1e-3},
    "parallel": {},
    "precision": {},
    "checkpoint": {},
}
LEARNED = {"model.position_embedding_type": "learned_absolute"}
SGD = {"optim.name": "sgd"}
TWO_LEVEL = {"parallel.context_method": "two_level"}
WSD = {"optim.schedule": "WSD", "optim.wsd.decay_steps": 20}


MISTAKES = [
    *OPTION_MISTAKES,
    *MOE_MISTAKES,
    *KIND_MISTAKES,
    *DATA_MISTAKES,
    *FP8_MISTAKES,
    # names
    Mistake({"train.lr": 0.1}, r"there is no setting train.lr; did you mean optim.lr\? remove train.lr"),
    Mistake({"model.num_layer": 4}, r"there is no setting model.num_layer; did you mean model.num_layers\?"),
    Mistake({"model.rope_theta": 5e5}, r"did you mean model.rope.base\? use model.rope.base=500000.0"),
    Mistake({"parallel.tensor_model_parallel_size": 2}, r"did you mean parallel.tensor\? use parallel.tensor=2"),
    Mistake({"optim.zzz": 1}, r"there is no setting optim.zzz; remove optim.zzz"),
    Mistake({"optim.adamw.lr": 1}, r"no setting optim.adamw.lr; did you mean optim.lr\? remove optim.adamw.lr"),
    Mistake({"optim.adamw.beta": [0.8, 0.9]}, r"did you mean optim.adamw.betas\? use optim.adamw.betas=\[0.8, 0.9\]"),
    Mistake({"optim.eps": 1e-6, "optim.adamw.eps": 1e-7}, r"optim.eps is now optim.adamw.eps, .*; remove optim.eps$"),
    Mistake({"train.loss_scale_window": 5}, r"did you mean precision.loss_scale.window\?"),
    Mistake(
        {"optim.adam": {"eps": 1e-6}}, r"no group optim.adam; did you mean optim.adamw\? use optim.adamw.eps=1.0e-06"
    ),
    Mistake({"train.wsd": {"zzz": 1}}, r"no group train.wsd; did you mean optim.wsd\? remove train.wsd"),
    Mistake(
        {"optim.zzz": {"yyy": 1}},
        r"no group optim.zzz; available groups: optim.weight_decay_ramp, .*; remove optim.zzz",
    ),
    Mistake({"optim.adamw": 0.9}, r"optim.adamw must be a group of settings; got 0.9; remove optim.adamw"),
    Mistake({"modle": {"hidden_dropout": 0.1}}, r"no group modle; did you mean model\? use model.hidden_dropout=0.1"),
    Mistake({"zzz": {"a": 1}}, r"there is no group zzz; available groups: model, data, .*; remove zzz"),
    Mistake({"lr": 1}, r"there is no setting lr; did you mean optim.lr\?"),
    # presence
    Mistake({"model.num_layers": None}, r"model.num_layers is missing; use model.num_layers=12"),
    Mistake(
        {"model": None},
        r"model.num_layers is missing, and model.preset is not set either .* use model.preset=llama-28m",
        None,
        2,
    ),
    Mistake({"data.seq_length": None}, r"data.seq_length is missing; use data.seq_length=1024"),
    Mistake({"train.global_batch_size": None}, r"train.global_batch_size is missing; use train.global_batch_size=32"),
    Mistake({"train.steps": None}, r"train.steps is missing; use train.steps=1000"),
    Mistake({"optim.lr": None}, r"optim.lr is missing; use optim.lr=0.0003"),
    # types and ranges
    Mistake({"train.steps": "100"}, r"train.steps must be an integer; got '100'; use train.steps=100$"),
    Mistake({"train.steps": 100.0}, r"train.steps must be an integer; got 100.0; use train.steps=100$"),
    Mistake({"train.steps": True}, r"train.steps must be an integer; got True; use train.steps=1000"),
    Mistake({"train.steps": "soon"}, r"train.steps must be an integer; got 'soon'; use train.steps=1000"),
    Mistake({"train.steps": 0}, r"train.steps must be at least 1; got 0; use train.steps=1$"),
    Mistake({"train.seed": -1}, r"train.seed must be at least 0; got -1; use train.seed=0"),
    Mistake({"train.seed": 2**63}, r"train.seed must be below 9223372036854775808"),
    Mistake({"train.deterministic": 1}, r"train.deterministic must be true or false; got 1; use .*=false"),
    Mistake({"train.log_every": 0}, r"train.log_every must be at least 1"),
    Mistake({"optim.lr": "3e-4"}, r"optim.lr must be a number; got '3e-4'; use optim.lr=0.0003"),
    Mistake({"optim.lr": 0}, r"optim.lr must be above 0.*; use optim.lr=0.0003"),
    Mistake({"optim.lr": float("nan")}, r"optim.lr must be (above|finite)"),
    Mistake({"optim.lr": float("inf")}, r"optim.lr must be finite; got inf"),
    Mistake(
        {"optim.adamw.betas": 0.9}, r"optim.adamw.betas must be a list; got 0.9; use optim.adamw.betas=\[0.9, 0.95\]"
    ),
    Mistake({"optim.adamw.betas": [0.9]}, r"optim.adamw.betas\[1\] must be given"),
    Mistake({"optim.adamw.betas": [0.9, 0.95, 0.99]}, r"optim.adamw.betas must have at most 2 entries"),
    Mistake({"optim.adamw.betas": [0.9, 1.0]}, r"optim.adamw.betas\[1\] must be below 1"),
    Mistake({"optim.weight_decay": -0.1}, r"optim.weight_decay must be at least 0"),
    Mistake({"model.hidden_dropout": 1.0}, r"model.hidden_dropout must be below 1"),
    Mistake({"model.normalization": "rmsnorm"}, r"must be 'RMSNorm' or 'LayerNorm'; got 'rmsnorm'; use .*=RMSNorm"),
    Mistake({"optim.schedule": "cosin"}, r"optim.schedule must be 'constant', .*; use optim.schedule=cosine"),
    Mistake({"precision.dtype": "bf16"}, r"use precision.dtype=bfloat16"),
    Mistake({"run": ""}, r"run must not be empty; got ''; use run=runs/default"),
    Mistake({"run": 2024}, r"run must be text; got 2024; use run='2024'"),
    Mistake({"data": 5}, r"data must be a group of settings; got 5", None, 1),
    Mistake(
        {"model.preset": "lama-28m"}, r"model.preset must be one of bert.*; got 'lama-28m'; use model.preset=llama-28m"
    ),
    Mistake({"parallel.tensor": 0}, r"parallel.tensor must be at least 1; got 0; use parallel.tensor=1"),
    Mistake({"parallel.shard": 0}, r"parallel.shard must be at least 1, or -1 .*; got 0; use parallel.shard=-1"),
    Mistake({"parallel.shard": -2}, r"parallel.shard must be at least 1, or -1"),
    Mistake({"parallel.replicate": -1}, r"parallel.replicate must be at least 1"),
    Mistake({"checkpoint.keep": 0}, r"checkpoint.keep must be at least 1"),
    # model shape
    Mistake({"model.num_attention_heads": 20}, r"hidden_size \(96\) must be divisible by .*heads \(20\).*=24"),
    Mistake(
        {"model.kv_channels": 5}, r"kv_channels \(5\), the number of features that rope rotates .*, must be even; .*=6"
    ),
    Mistake({"model.hidden_size": 84}, r"kv_channels \(7\), .* must be even; use model.hidden_size=96"),
    Mistake({"model.num_query_groups": 5}, r"heads \(12\) must be divisible by .*groups \(5\); use .*groups=6"),
    Mistake({"model.num_query_groups": 24}, r"heads \(12\) must be divisible by .*groups \(24\); use .*groups=12"),
    Mistake(
        LEARNED | {"model.max_position_embeddings": 32}, r"\(32\) must be at least data.seq_length \(64\); use .*=64"
    ),
    Mistake({"model.max_position_embeddings": 64}, r"has no effect with model.position_embedding_type=rope"),
    Mistake(
        {"model.mtp.num_modules": 60, "data.seq_length": 48},
        r"model.mtp.num_modules \(60\) must be below data.seq_length \(48\); use model.mtp.num_modules=47",
    ),
    Mistake({"model.mtp.loss_weight": 0.0}, r"model.mtp.loss_weight must be above 0.0; got 0.0"),
    Mistake(LEARNED | {"model.rope.base": 1e4}, r"rope.base \(10000.0\) has no effect with .*=learned_absolute"),
    Mistake(
        {"model.activation": "gelu", "model.glu.clamp": 7.0}, r"glu.clamp \(7.0\) has no effect with .*=gelu, only"
    ),
    Mistake(
        {"model.residual.norm_placement": "post", "model.residual.fp32": True},
        r"residual.fp32 \(True\) has no effect with model.residual.norm_placement=post, only with .*=pre or sandwich",
    ),
    Mistake({"model.residual.norm_placement": "after"}, r"norm_placement must be .*'sandwich'; got 'after'; use"),
    Mistake({"model.multipliers.logit_softcap": 0.0}, r"logit_softcap must be above 0.0; got 0.0"),
    Mistake({"model.final_logit_softcapping": 30.0}, r"did you mean model.multipliers.logit_softcap\?"),
    # parallel layout
    Mistake({"parallel.tensor": 8}, r"heads \(12\) must be divisible by parallel.tensor \(8\); use .*tensor=4"),
    Mistake(
        {"parallel.tensor": 3, "model.ffn_hidden_size": 258},
        r"groups \(4\) must be divisible by parallel.tensor \(3\), or divide it; use parallel.tensor=2",
    ),
    Mistake(
        {"parallel.tensor": 2, "model.num_query_groups": 3},
        r"groups \(3\) must be divisible by parallel.tensor \(2\), or divide it; use parallel.tensor=1",
    ),
    Mistake(
        {"parallel.tensor": 4, "model.num_query_groups": 6},
        r"groups \(6\) must be divisible by parallel.tensor \(4\), or divide it; use parallel.tensor=2",
        4,
    ),
    Mistake({"parallel.tensor": 4, "model.ffn_hidden_size": 258}, r"ffn_hidden_size \(258\) .*; use .*=260"),
    Mistake({"parallel.sequence": True}, r"parallel.sequence=true needs parallel.tensor above 1.*=false"),
    Mistake(
        {"parallel.sequence": True, "parallel.tensor": 4, "data.seq_length": 66},
        r"data.seq_length \(66\) must be divisible by parallel.tensor \(4\).* use data.seq_length=68",
    ),
    Mistake({"parallel.tensor": 2, "parallel.shard": 2}, r"shard \(2\) must equal the number of ranks \(8\)", 8),
    Mistake({"parallel.pipeline": 3}, r"tensor \(1\) x parallel.pipeline \(3\) x .*; use parallel.pipeline=4$", 4),
    Mistake({"parallel.pipeline": 8}, r"num_layers \(4\) must be at least parallel.pipeline \(8\) x .*; use .*=4", 8),
    Mistake({"parallel.pipeline": 2, "parallel.virtual": 3}, r"num_layers \(4\) must be at least .* \(3\); use .*=2"),
    Mistake({"parallel.virtual": 2}, r"parallel.virtual \(2\) has no effect with parallel.pipeline=1; use .*=null"),
    Mistake(
        {"parallel.pipeline": 2, "parallel.schedule": "interleaved"},
        r"parallel.schedule \(interleaved\) must be 1f1b or gpipe or zero_bubble with .*=1; use parallel.virtual=2$",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "1f1b"},
        r"parallel.schedule \(1f1b\) must be interleaved or zb_v with parallel.virtual=2; use parallel.schedule=null$",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zero_bubble"},
        r"parallel.schedule \(zero_bubble\) must be interleaved or zb_v with parallel.virtual=2; use .*=null",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.schedule": "zb_v", "parallel.stage_layers": [1, 3]},
        r"schedule \(zb_v\) must be 1f1b or gpipe or zero_bubble with .*=1; use parallel.schedule=null$",
    ),
    Mistake(
        {
            "parallel.pipeline": 2,
            "parallel.schedule": "zero_bubble",
            "train.compile": True,
            "experimental": ["compile"],
        },
        r"train.compile=true cannot be combined with parallel.schedule=zero_bubble: .*; use parallel.schedule=null$",
    ),
    Mistake(
        {
            **{"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zb_v"},
            **{"train.compile": True, "experimental": ["compile"], "parallel.shard": 1, "train.global_batch_size": 6},
        },
        r"train.compile=true cannot be combined with parallel.schedule=zb_v: .*; use .*virtual=null, .*schedule=null$",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.schedule": "zero_bubble", "train.fused_linear_cross_entropy": True},
        r"cross_entropy=true cannot be combined with .*=zero_bubble: the fused loss .*; .*parallel.schedule=null$",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.stage_layers": [1, 2]},
        r"stage_layers \(1, 2\) must have 2 entries, one per stage, that add up to model.num_layers \(4\); use .*=null",
    ),
    Mistake(
        {"parallel.pipeline": 2, "parallel.virtual": 2, "train.global_batch_size": 6, "parallel.shard": 1},
        r"number of micro-batches per step \(3\) must be a multiple of .*pipeline \(2\); use train.global_batch_size=8",
    ),
    Mistake(
        {"parallel.tensor": 2}, r"tensor .* number of ranks \(1; --nproc 2 would start 2\); use parallel.tensor=1$", 1
    ),
    Mistake({"parallel.tensor": 4}, r"tensor \(4\) x .*replicate \(1\) must divide the number of ranks \(6\)", 6),
    Mistake({"parallel.context": 0}, r"parallel.context must be at least 1; got 0; use parallel.context=1"),
    Mistake({"parallel.context_parallel_size": 2}, r"did you mean parallel.context\? use parallel.context=2"),
    Mistake(
        {"parallel.context_method": "all_gather"},
        r"context_method=all_gather needs parallel.context above 1; got 1; use parallel.context_method=null$",
    ),
    Mistake({"parallel.context": 2, "parallel.context_inner": 2}, r"context_inner \(2\) has no effect with .*=ring"),
    Mistake(
        {"parallel.context": 4, "data.seq_length": 68},
        r"data.seq_length \(68\) must be divisible by 8 with parallel.context=4; use data.seq_length=72",
    ),
    Mistake(
        {"parallel.context": 2, "parallel.tensor": 4, "parallel.sequence": True, "data.seq_length": 68},
        r"seq_length \(68\) must be divisible by 8 with parallel.context=2 and .*=true over 4 ranks; use .*=72",
    ),
    Mistake(
        TWO_LEVEL | {"parallel.context": 8},
        r"two_level needs parallel.context_inner to divide parallel.context \(8\) and be smaller; got None; use .*=2",
    ),
    Mistake(
        TWO_LEVEL | {"parallel.context": 2, "parallel.context_inner": 2},
        r"to divide parallel.context \(2\) and be smaller; got 2; use parallel.context_method=null, .*inner=null",
    ),
    Mistake(
        {"parallel.context": 8, "parallel.context_method": "all_to_all", "parallel.tensor": 2},
        r"needs parallel.context \(8\) to divide the 6 attention heads of a .*rank; use parallel.context_method=null",
    ),
    Mistake(
        {
            "parallel.context": 8,
            "parallel.context_method": "two_level",
            "parallel.context_inner": 4,
            "parallel.tensor": 2,
        },
        r"needs parallel.context_inner \(4\) to divide the 6 attention heads of a tensor-parallel rank",
    ),
    Mistake({"parallel.context": 4}, r"tensor \(1\) x .*context \(4\) x .*replicate \(1\) must divide .*\(6\)", 6),
    Mistake({"parallel.context": 16, "parallel.shard": 4}, r"divisible by the 64 ranks of parallel.shard x .*context"),
    Mistake({"parallel.shard": 5}, r"hidden_size \(96\) must be divisible by the 5 ranks of parallel.shard", None, 1),
    Mistake({}, r"model.hidden_size \(96\) must be divisible by the 5 ranks", 5, 1),
    Mistake(
        {"parallel.replicate": 5}, r"global_batch_size \(24\) .*micro_batch_size \(2\) x data-parallel ranks \(5\)", 5
    ),
    Mistake(
        {"train.global_batch_size": 25}, r"global_batch_size \(25\) must be divisible by .*; use .*batch_size=1", 1
    ),
    # schedules
    Mistake(
        {"train.batch_size_schedule": "0:16 1K:24"},
        r"train.global_batch_size \(24\) has no effect with train.batch_size_schedule=0:16 1K:24",
    ),
    Mistake(
        {"train.batch_size_schedule": "0:16 1K:25", "train.global_batch_size": None},
        r"every batch size of train.batch_size_schedule \(25\) must .* use train.batch_size_schedule=0:16 1K:26",
        1,
    ),
    Mistake(
        {"train.batch_size_schedule": "1K:16 5K:32", "train.global_batch_size": None},
        r"must begin at threshold 0.* use train.batch_size_schedule=0:16 5K:32",
    ),
    Mistake(
        {"train.batch_size_schedule": "0:16 5K:32 1K:24", "train.global_batch_size": None},
        r"thresholds .* must increase.* use train.batch_size_schedule=0:16 1K:24 5K:32",
    ),
    Mistake(
        {"train.batch_size_schedule": "0=16, 1k=24", "train.global_batch_size": None},
        r"must look like 10K:32.*use train.batch_size_schedule=0:16 1K:24",
    ),
    Mistake(
        {
            "train.batch_size_schedule": "0:16 100:24 120:32",
            "train.batch_size_schedule_unit": "tokens",
            "train.global_batch_size": None,
        },
        r"in tokens with data.seq_length=64: .* use train.batch_size_schedule=0:16 100:24",
    ),
    Mistake({"train.batch_size_schedule_unit": "tokens"}, r"no effect without train.batch_size_schedule"),
    Mistake({"train.evaluation.every": 10}, r"train.evaluation needs data.valid, .*; remove train.evaluation$"),
    Mistake(
        {"train.generation.every": 5, "train.generation.prompts": [""]},
        r"train.generation.prompts\[0\] must not be empty; got ''; use train.generation.prompts=\[Once upon a time\]",
    ),
    Mistake({"data.valid": {}}, r"data.valid must have at least 1 entry; got {}; use data.valid=null$"),
    Mistake({"data.valid": ["a"]}, r"data.valid must be a prefix, or several by name: .*; got \['a'\]; use .*={a: a}$"),
    Mistake({"data.valid": {"web": "a", "co.de": "b"}}, r"valid.co.de must be a name made of letters, digits, _ and -"),
    Mistake({"data.valid": {"web": "a", "code": 3}}, r"data.valid.code must be text; got 3; use data.valid=null$"),
    Mistake({"data.valid": {"web": {"a": "b"}}}, r"data.valid.web must be text; got {'a': 'b'}"),
    Mistake({"data.valid": {"web": ""}}, r"data.valid.web must not be empty"),
    Mistake({"checkpoint.async_save": True}, r"checkpoint.async_save .* checkpoint.every"),
    Mistake({"checkpoint.keep_best": True}, r"keep_best needs data.valid, .*; use checkpoint.keep_best=false$"),
    Mistake(
        {"checkpoint.keep_best": True, "data.valid": "held_out", "train.evaluation.every": 10},
        r"keep_best needs checkpoint.every; without it .*; use checkpoint.every=10$",
    ),
    Mistake(
        {"checkpoint.keep_best": True, "checkpoint.every": 25, "data.valid": "held_out", "train.evaluation.every": 10},
        r"checkpoint.every \(25\) must be a multiple of train.evaluation.every \(10\); use train.evaluation.every=25$",
    ),
    Mistake(
        {"checkpoint.keep_best": True, "checkpoint.every": 25, "data.valid": "held_out"},
        r"needs an evaluation at every checkpoint: .*; use train.evaluation.every=25$",
    ),
    Mistake(
        {"train.evaluation.samples": 10, "data.valid": "held_out"},
        r"train.evaluation.every is missing; use train.evaluation.every=100",
    ),
    Mistake({"optim.min_lr": 0.1}, r"optim.min_lr \(0.1\) must be at most optim.lr \(0.001\); use optim.min_lr=0.0001"),
    Mistake({"optim.min_lr": 0.1, "optim.schedule": "constant"}, r"min_lr \(0.1\) has no effect with .*=constant"),
    Mistake({"optim.decay_steps": 9, "optim.schedule": "inverse-square-root"}, r"decay_steps \(9\) has no effect"),
    Mistake({"optim.warmup_steps": 100}, r"warmup_steps \(100\) must be below .*decay_steps \(100\); use .*=10"),
    Mistake({"optim.warmup_steps": 101, "optim.schedule": "constant"}, r"must be at most train.steps \(100\)"),
    Mistake(
        {"optim.schedule": "WSD"},
        r"wsd.decay_steps is missing: optim.schedule=WSD needs it; use optim.wsd.decay_steps=20",
    ),
    Mistake(WSD | {"optim.wsd.decay_steps": 101}, r"must be at most .*decay_steps - .*warmup_steps \(100\)"),
    Mistake({"optim.wsd.decay_steps": 20}, r"no effect with optim.schedule=cosine, only with optim.schedule=WSD"),
    Mistake(
        {"optim.wsd.decay_style": "linear"}, r"wsd.decay_style \(linear\) has no effect with optim.schedule=cosine"
    ),
    Mistake({"optim.weight_decay_ramp.end": 0.2}, r"weight_decay_ramp.schedule is missing; use .*schedule=linear"),
    Mistake({"optim.weight_decay_ramp.schedule": "linear"}, r"weight_decay_ramp.end is missing; use .*end=0.2"),
    Mistake(
        {"optim.weight_decay_ramp": {"schedule": "constant", "end": 0.2}}, r"schedule must be 'linear' or 'cosine'"
    ),
    Mistake({"optim.sgd.momentum": 0.9}, r"sgd.momentum \(0.9\) has no effect with optim.name=adamw, only with .*=sgd"),
    Mistake(SGD | {"optim.adamw.eps": 1e-6}, r"adamw.eps \(1e-06\) has no effect with optim.name=sgd"),
    Mistake(
        SGD | {"optim.sgd.momentum": 0.0, "optim.sgd.nesterov": True},
        r"nesterov=true needs optim.sgd.momentum above 0.*; use .*momentum=0.9",
    ),
    Mistake({"optim.overrides": [{"match": "*"}]}, r"overrides\[0\] must set max_lr, min_lr or wd_mult; .*=null|\[\]"),
    Mistake({"optim.overrides": [{"match": "*", "max_lr": 0.1, "min_lr": 0.2}]}, r"min_lr \(0.2\) must be at most"),
    Mistake({"optim.overrides": [{"mach": "*", "wd_mult": 0.0}]}, r"overrides\[0\].match must be given", None, 1),
    Mistake({"optim.overrides": [{"match": "*", "wd_mult": -1}]}, r"overrides\[0\].wd_mult must be at least 0"),
    Mistake({"optim.overrides": {"match": "*"}}, r"optim.overrides must be a list"),
    Mistake(
        {"optim.overrides": [{"match": "*", "max_lr": 0.1, "min_lr": 0.0}], "optim.schedule": "constant"},
        r"overrides\[0\]: min_lr has no effect with optim.schedule=constant; use .*max_lr: 0.1",
    ),
    Mistake(
        {"precision.loss_scale.hysteresis": 2},
        r"precision.loss_scale.hysteresis \(2\) has no effect with precision.dtype=float32",
    ),
    Mistake(
        {"precision.dtype": "float16", "precision.loss_scale.minimum": 1e6},
        r"loss_scale.minimum \(1000000.0\) must be at most precision.loss_scale.initial \(65536.0\)",
    ),
    Mistake({"train.compile": True}, r"train.compile=true is experimental .* use experimental=\[compile\]"),
    Mistake(
        {"experimental": ["compile"]}, r"'compile' has no effect without train.compile=true; use experimental=null"
    ),
    Mistake(
        {"experimental": ["fp5"]},
        r"'fp5' is not a feature; available: compile, fp8, deep_ep, symmetric_memory; use experimental=null",
    ),
    Mistake({"experimental": ["compil"], "train.compile": True}, r"is experimental", None, 1),
]
