"""Counts in closed form what a BERT stage exchanges per micro-batch, and lists its weights; X is [S/cp, B, H] in bytes.

    embedding   leaves tensor parallelism                                                 1 X
    layer       see ``layer_traffic``                                                     4 X
    head        under sequence parallelism, whole rows are gathered once for all heads    1 X in forward
                the loss of a masked token gathers three numbers, and sums a gradient [H]
                a classifier that pools means sums those of each row's text, and of the padding after it, over
                context: [B, 2, H]

The number of masked tokens depends on the text, so their traffic is given per token.
"""

import torch

from megalith.config import BertConfig, RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.cross_entropy import loss_traffic
from megalith.parallel.tensor.regions import enter_traffic
from megalith.parallel.traffic import Traffic, collective
from megalith.training.tasks.layer_traffic import (
    LayerTraffic,
    embedding_weight,
    layer_weights,
    norm_weights,
    position_weights,
)
from megalith.training.tasks.task import StageTraffic
from megalith.transformer.stage import Stage

__all__ = ["bert_traffic"]


def bert_traffic(config: RunConfig, layout: Layout, stage: Stage) -> StageTraffic:
    """Counts the traffic of ``stage`` on each rank of ``layout`` that holds it."""
    model, sequence, parts = config.model, config.parallel.sequence, LayerTraffic(config, layout)
    assert model.bert is not None, "the model is a BERT"
    S, reads_out = config.data.seq_length // layout.context, _reads_out(model)
    micro_batch = Traffic()
    if stage.has_embedding:
        embedding = parts.leave(S)
        micro_batch += embedding.forward + embedding.backward
    if stage.has_head:
        micro_batch += parts.enter(S).forward  # all tp ranks compute the same from it: no exchange in backward
        micro_batch += _means_traffic(config, parts, model.bert)
    for _ in stage.layers:
        micro_batch += parts.layer({"self_attn": parts.self_attention(S), "mlp": parts.feed_forward(S)})
    per_label = Traffic()
    if stage.has_head and model.bert.head == "pretraining":
        row = enter_traffic(model.hidden_size * parts.dtype.itemsize, layout.tensor, sequence_parallel=False)
        label = row + loss_traffic(1, parts.dtype, layout.tensor)
        per_label = label.forward + label.backward
    shares_embedding = reads_out and stage.has_embedding != stage.has_head
    return StageTraffic(
        micro_batch,
        per_label=per_label,
        units=[layer_weights(model, layout.tensor, sequence) for _ in stage.layers],
        rest=_other_weights(model, model.bert, stage, sequence),
        shared={"embedding": embedding_weight(model)} if shares_embedding else {},
        hidden_bytes=parts.hidden_bytes(S),
    )


def _means_traffic(config: RunConfig, parts: LayerTraffic, bert: BertConfig) -> Traffic:
    """Counts the sums over context of pooled means, in forward and backward."""
    if bert.head == "pretraining" or bert.classifier_pooling == "first":
        return Traffic()
    itemsize = torch.promote_types(parts.dtype, torch.float32).itemsize
    sums = 2 * config.train.micro_batch_size * config.model.hidden_size * itemsize
    return collective("context", "all_reduce", sums, parts.layout.context, times=2)


def _other_weights(model: TransformerConfig, bert: BertConfig, stage: Stage, sequence: bool) -> list[Weight]:
    """Lists the weights of the stage outside its layers; in the head, each tp rank computes the same on whole rows."""
    H, is_post = model.hidden_size, model.residual.norm_placement == "post"
    found: list[Weight] = []
    if stage.has_embedding or (stage.has_head and _reads_out(model)):
        found.append(embedding_weight(model))
    if stage.has_embedding:
        found += position_weights(model, sequence)
        found += [Weight((bert.num_token_types, H), partial=sequence)] * (bert.num_token_types > 0)
        found += norm_weights(model, sequence) if is_post else []
    if not stage.has_head:
        return found
    found += [] if is_post else norm_weights(model, sequence)
    dense, num_scores = [Weight((H, H)), Weight((H,))], bert.num_text_scores
    if bert.head == "pretraining":
        assert model.vocab_size is not None, "set by preflight"
        found += [*dense, *norm_weights(model, partial=False), Weight((model.vocab_size,), split=0)]
        found += [] if model.tie_word_embeddings else [embedding_weight(model)]  # the head has the same shape
    return [*found, *dense, Weight((num_scores, H)), Weight((num_scores,))] if num_scores else found


def _reads_out(model: TransformerConfig) -> bool:
    """Returns whether the output projection is the embedding."""
    return model.bert is not None and model.bert.head == "pretraining" and model.tie_word_embeddings
