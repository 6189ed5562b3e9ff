"""Counts in closed form what a BERT stage exchanges per micro-batch, and lists its weights; X is [S/cp, B, H] in bytes.

    embedding   leaves tensor parallelism                                                 1 X
    layer       see ``layer_traffic``                                                     4 X
    head        under sequence parallelism, whole rows are gathered once for all heads    1 X in forward
                the loss of a masked token gathers three numbers, and sums a gradient [H]
                a head that pools means sums those of a row's T texts, and of the padding after them, over context:
                [B, T + 1, H]; only an embedding has more than one text in a row
    step        embeddings of all R rows of a rank are summed over context and gathered over data: [R, T, D]; of their
                passages, the texts' ids are gathered too

The number of masked tokens depends on the text, so their traffic is given per token. A micro-batch in which every row
is full sums one mean less.
"""

import torch

from megalith.config import BertConfig, RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.cross_entropy import loss_traffic
from megalith.parallel.tensor.regions import enter_traffic
from megalith.parallel.traffic import Passes, Traffic, collective
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
    ends, layers, forward = Passes(), Traffic(), Traffic()
    if stage.has_embedding:
        ends += parts.leave(S)
    if stage.has_head:
        ends += Passes(parts.enter(S).forward)  # all tp ranks compute the same from it: no exchange in backward
        ends += _means_traffic(config, parts, model.bert)
    blocks = {"self_attn": parts.self_attention(S), "mlp": parts.feed_forward(S)}
    for _ in stage.layers:
        layers += parts.layer(blocks)
        forward += sum((block.whole.forward for block in blocks.values()), start=Traffic())
    per_label = Traffic()
    if stage.has_head and model.bert.head == "pretraining":
        row = enter_traffic(model.hidden_size * parts.dtype.itemsize, layout.tensor, sequence_parallel=False)
        label = row + loss_traffic(1, parts.dtype, layout.tensor)
        per_label = label.forward + label.backward
    shares_embedding = reads_out and stage.has_embedding != stage.has_head
    return StageTraffic(
        ends.forward + ends.backward + layers,
        per_label=per_label,
        units=[layer_weights(model, layout.tensor, sequence) for _ in stage.layers],
        rest=_other_weights(model, model.bert, stage, sequence),
        shared={"embedding": embedding_weight(model)} if shares_embedding else {},
        hidden_bytes=parts.hidden_bytes(S),
        forward=ends.forward + forward,
        per_step=_comparison_traffic(config, parts, model.bert) if stage.has_head else Traffic(),
    )


def _means_traffic(config: RunConfig, parts: LayerTraffic, bert: BertConfig) -> Passes:
    """Counts the sums over context of pooled means."""
    pooling = bert.embedding_pooling if bert.head == "embedding" else bert.classifier_pooling
    if bert.head == "pretraining" or pooling == "first":
        return Passes()
    num_means = 1 + (2 + config.data.num_negatives if bert.head == "embedding" else 1)
    num_bytes = num_means * config.train.micro_batch_size * config.model.hidden_size * _wide(parts).itemsize
    sums = collective("context", "all_reduce", num_bytes, parts.layout.context)
    return Passes(sums, sums)


def _comparison_traffic(config: RunConfig, parts: LayerTraffic, bert: BertConfig) -> Traffic:
    """Counts what a step exchanges to compare embeddings, in forward and backward."""
    if bert.head != "embedding":
        return Traffic()
    layout, num_passages = parts.layout, 1 + config.data.num_negatives
    num_rows = config.train.global_batch_size // layout.data_parallel
    num_features = bert.embedding_size or config.model.hidden_size
    of_text = num_features * _wide(parts).itemsize
    gathered = config.train.global_batch_size * num_passages * of_text
    about = config.train.global_batch_size * (2 + num_passages) * 8  # int64: a row's batch, and the ids of its texts
    sums = num_rows * (1 + num_passages) * of_text
    return (
        collective("context", "all_reduce", sums, layout.context, times=2)
        + collective("data", "all_gather", gathered, layout.data_parallel)
        + collective("data", "all_gather", about, layout.data_parallel)
        + collective("data", "reduce_scatter", gathered, layout.data_parallel)
    )


def _wide(parts: LayerTraffic) -> torch.dtype:
    return torch.promote_types(parts.dtype, torch.float32)


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
    if bert.head == "embedding" and bert.embedding_size is not None:
        found += [Weight((bert.embedding_size, H)), Weight((bert.embedding_size,))]
    return [*found, *dense, Weight((num_scores, H)), Weight((num_scores,))] if num_scores else found


def _reads_out(model: TransformerConfig) -> bool:
    """Returns whether the output projection is the embedding."""
    return model.bert is not None and model.bert.head == "pretraining" and model.tie_word_embeddings
