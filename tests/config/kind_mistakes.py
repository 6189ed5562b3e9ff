"""Settings that do not go with the kind of model."""

from typing import Any

from tests.config.mistake import Mistake

__all__ = ["KIND_MISTAKES"]

BERT: dict[str, Any] = {"model.bert.num_token_types": 2}
RELATIVE: dict[str, Any] = {"model.position_embedding_type": "relative"}
T5: dict[str, Any] = {**RELATIVE, "model.t5.num_decoder_layers": 2, "model.num_query_groups": None}
WRITES: dict[str, Any] = {"train.generation.every": 4, "train.generation.prompts": ["a <extra_id_0>"]}

KIND_MISTAKES = [
    Mistake({"model.bert.binary_head": False}, r"model.bert.num_token_types is missing; use .*num_token_types=2"),
    Mistake(
        {**BERT, "model.mtp.num_modules": 1},
        r"model.mtp cannot be combined with model.bert: .* an encoder already sees; remove model.mtp",
    ),
    Mistake(
        {**BERT, "model.moe.num_experts": 4},
        r"model.moe cannot be combined with model.bert: padding would .*; remove model.moe",
    ),
    Mistake(
        {**BERT, **WRITES},
        r"train.generation cannot be combined with model.bert: an encoder does not generate text; "
        r"remove train.generation",
    ),
    Mistake(
        {**BERT, "model.bert.head": "classification"},
        r"model.bert.num_classes is missing: .*number of classes; use model.bert.num_classes=2",
    ),
    Mistake(
        {**BERT, "model.bert.head": "embedding", "train.global_batch_size": 1, "train.micro_batch_size": 1},
        r"global_batch_size \(1\) must be at least 2 with model.bert.head=embedding .*; use .*global_batch_size=2",
    ),
    Mistake(
        {**BERT, "model.bert.similarity_temperature": 0.1},
        r"model.bert.similarity_temperature \(0.1\) has no effect with model.bert.head=pretraining, only .*=embedding",
    ),
    Mistake(
        {"data.query_in_block_probability": 0.5},
        r"data.query_in_block_probability \(0.5\) needs model.bert.head=embedding: .*; remove|use",
    ),
    Mistake(
        {"data.num_negatives": 1},
        r"data.num_negatives \(1\) needs model.bert.head=embedding: .*; use data.num_negatives=null",
    ),
    Mistake(
        {**BERT, "model.bert.position_offset": 2},
        r"position_offset \(2\) has no effect with model.position_embedding_type=rope, .*; use .*position_offset=null",
    ),
    Mistake(
        {**BERT, "model.bert.num_classes": 3},
        r"model.bert.num_classes \(3\) has no effect with model.bert.head=pretraining, only with .*=classification",
    ),
    Mistake(
        {**BERT, "model.bert.head": "multiple_choice", "model.bert.binary_head": True},
        r"model.bert.binary_head \(True\) has no effect with model.bert.head=multiple_choice, only",
    ),
    Mistake(RELATIVE, r"position_embedding_type \(relative\) needs model.t5; use .*position_embedding_type=null"),
    Mistake(
        {**T5, "model.position_embedding_type": None},
        r"position_embedding_type \(rope\) must be relative with model.t5; use .*position_embedding_type=relative",
    ),
    Mistake({**T5, **BERT}, r"model.bert.num_token_types \(2\) must be null with model.t5; remove model.bert"),
    Mistake(
        {**T5, "model.mtp.num_modules": 1}, r"model.mtp.num_modules \(1\) must be null with model.t5; remove model.mtp"
    ),
    Mistake({**T5, "model.moe.num_experts": 4}, r"model.moe.num_experts \(4\) must be null with model.t5; remove"),
    Mistake({**T5, "model.attention.window": 8}, r"model.attention.window \(8\) must be null with model.t5; "),
    Mistake({**T5, "model.attention.softmax": "learnable"}, r"softmax \(learnable\) must be vanilla with model.t5; "),
    Mistake({**T5, "model.attention.output_gate": True}, r"output_gate \(True\) must be False with model.t5; "),
    Mistake({**T5, "model.num_query_groups": 4}, r"model.num_query_groups \(4\) must be 12 with model.t5; "),
    Mistake(
        {**T5, "model.relative_position.num_buckets": 10},
        r"num_buckets \(10\) must be divisible by 4, .*; use model.relative_position.num_buckets=12",
    ),
    Mistake(
        {**T5, "model.relative_position.max_distance": 16},
        r"max_distance \(16\) must be above 16, the number of distances .*; use .*max_distance=128",
    ),
    Mistake(
        {"model.relative_position.num_buckets": 8},
        r"relative_position.num_buckets \(8\) has no effect with model.position_embedding_type=rope, only with",
    ),
    Mistake(
        {**T5, **WRITES, "parallel.context": 2},
        r"parallel.context \(2\) must be 1 with model.t5 and train.generation: .*; remove train.generation",
        2,
    ),
    Mistake(
        {**T5, **WRITES, "parallel.tensor": 2, "parallel.sequence": True},
        r"parallel.sequence \(True\) must be False with model.t5 and train.generation: .*; remove train.generation",
        2,
    ),
    Mistake(
        {**T5, "parallel.pipeline": 2, "parallel.stage_layers": [2, 2]},
        r"add up to model.num_layers \+ model.t5.num_decoder_layers \(6\); use",
        2,
    ),
]
