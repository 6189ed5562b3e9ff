"""Counts in closed form what a T5 stage exchanges per micro-batch, and lists its weights.

With X for the encoder's rows, [Se/cp, B, H] in bytes, and Y for the decoder's:

    embedding          both leave tensor parallelism                                          1 X + 1 Y
    encoder layer      see ``layer_traffic``                                                  4 X
    decoder layer      with cross attention, for which the encoder output enters each time    1 X + 6 Y
    head               enters tensor parallelism; the loss gathers three numbers per token    1 Y
"""

from megalith.config import RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.cross_entropy import loss_traffic
from megalith.parallel.traffic import Passes
from megalith.training.tasks.layer_traffic import Block, LayerTraffic, embedding_weight, layer_weights, norm_weights
from megalith.training.tasks.task import StageTraffic
from megalith.transformer.stage import Stage

__all__ = ["t5_traffic"]


def t5_traffic(config: RunConfig, layout: Layout, stage: Stage, decoder_seq_length: int) -> StageTraffic:
    """Counts the traffic of ``stage`` on each rank of ``layout`` that holds it."""
    model, sequence, parts = config.model, config.parallel.sequence, LayerTraffic(config, layout)
    Se, Sd = (S // layout.context for S in (config.data.seq_length, decoder_seq_length))
    whole = Passes()
    if stage.has_embedding:
        whole += parts.leave(Se) + parts.leave(Sd)
    if stage.has_head:
        whole += parts.enter(Sd) + loss_traffic(parts.num_tokens(Sd), parts.dtype, layout.tensor)
    micro_batch = whole.forward + whole.backward
    in_encoder: dict[str, Block] = {"self_attn": parts.self_attention(Se), "mlp": parts.feed_forward(Se)}
    in_decoder = {
        "self_attn": parts.self_attention(Sd),
        "cross_attn": parts.cross_attention(Sd, Se),
        "mlp": parts.feed_forward(Sd),
    }
    units: list[list[Weight]] = []
    for layer in stage.layers:
        is_decoder = layer >= model.num_layers
        micro_batch += parts.layer(in_decoder if is_decoder else in_encoder)
        units.append(layer_weights(model, layout.tensor, sequence, has_cross_attention=is_decoder))
    return StageTraffic(
        micro_batch,
        units=units,
        rest=_other_weights(model, stage, sequence),
        shared=_shared_weights(model, stage),
        hidden_bytes=parts.hidden_bytes(Se + Sd),
    )


def _stacks(model: TransformerConfig) -> dict[str, range]:
    """Returns the layers of each stack, in the numbering of stages."""
    assert model.t5 is not None, "the model is a T5"
    Le, Ld = model.num_layers, model.t5.num_decoder_layers
    return {"encoder": range(Le), "decoder": range(Le, Le + Ld)}


def _other_weights(model: TransformerConfig, stage: Stage, sequence: bool) -> list[Weight]:
    """Lists the weights of the stage outside its layers."""
    found: list[Weight] = []
    if stage.has_embedding or (stage.has_head and model.tie_word_embeddings):
        found.append(embedding_weight(model))
    if stage.has_head and not model.tie_word_embeddings:
        found.append(embedding_weight(model))  # the head has the same shape
    for layers in _stacks(model).values():
        if any(layer in layers for layer in stage.layers):
            found.append(_position_bias(model))
        if layers[-1] in stage.layers and model.residual.norm_placement != "post":
            found += norm_weights(model, sequence)
    return found


def _shared_weights(model: TransformerConfig, stage: Stage) -> dict[str, Weight]:
    """Returns the embedding, if another stage ties its output to it, and the position table of a split stack."""
    shared: dict[str, Weight] = {}
    if model.tie_word_embeddings and stage.has_embedding != stage.has_head:
        shared["embedding"] = embedding_weight(model)
    for name, layers in _stacks(model).items():
        num_here = sum(layer in layers for layer in stage.layers)
        if 0 < num_here < len(layers):
            shared[f"{name} positions"] = _position_bias(model)
    return shared


def _position_bias(model: TransformerConfig) -> Weight:
    assert model.relative_position is not None, "validated together with model.t5"
    return Weight((model.relative_position.num_buckets, model.num_attention_heads), split=1)
