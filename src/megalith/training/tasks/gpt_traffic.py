"""Counts in closed form what a GPT stage exchanges per micro-batch, and lists its weights; X is [S/cp, B, H] in bytes.

embedding   leaves tensor parallelism                                            1 X
layer       attention and feed-forward each enter and leave tensor parallelism   4 X
            latent attention enters with its latents instead of X, or with X and one of them
            see layer_traffic; for experts, transformer.moe.traffic
head        enters tensor parallelism                                            1 X
            the loss gathers three numbers per token
module      of multi-token prediction: an embedding, a layer and a head each     6 X
"""

from megalith.config import RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.errors import ConfigError
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.cross_entropy import loss_traffic
from megalith.parallel.traffic import Passes, Traffic
from megalith.training.tasks.layer_traffic import (
    LayerTraffic,
    embedding_weight,
    layer_weights,
    norm_weights,
    position_weights,
)
from megalith.training.tasks.task import StageTraffic
from megalith.transformer.moe.traffic import MicroBatch, expert_weights, moe_traffic, moe_weights
from megalith.transformer.stage import Stage

__all__ = ["gpt_traffic"]


def gpt_traffic(config: RunConfig, layout: Layout, stage: Stage) -> StageTraffic:
    """Counts the traffic of ``stage`` on each rank of ``layout`` that holds it, assuming even expert loads.

    Raises:
        ConfigError: traffic of experts is not counted: they are recomputed, or as in ``moe_traffic``.
    """
    if config.model.moe is not None and config.train.recompute != "none":
        raise ConfigError("the traffic of layers with experts is not counted with train.recompute")
    model, sequence, parts = config.model, config.parallel.sequence, LayerTraffic(config, layout)
    S = config.data.seq_length // layout.context
    whole = Passes()
    if stage.has_embedding:
        whole += parts.leave(S)
    head = parts.enter(S) + loss_traffic(parts.num_tokens(S), parts.dtype, layout.tensor)
    if stage.has_head:
        whole += head
    micro_batch = whole.forward + whole.backward
    units, experts = list[list[Weight]](), set[int]()
    for layer in stage.layers:
        micro_batch += _layer(parts, S, layer)
        if _has_experts(model, layer):
            experts.add(len(units))
            units.append(expert_weights(model))
        units.append(_layer_weights(model, layout.tensor, sequence, layer))
    if model.mtp is not None and stage.has_head:
        around = parts.leave(S) + head
        for layer in range(model.num_layers, model.num_layers + model.mtp.num_modules):
            micro_batch += around.forward + around.backward + _layer(parts, S, layer, in_module=True)
            if _has_experts(model, layer):
                experts.add(len(units))
                units.append(expert_weights(model))
            units.append(_module_weights(model, layout.tensor, sequence, layer))
    shares_embedding = _last_stage_embeds(model) and stage.has_embedding != stage.has_head
    return StageTraffic(
        micro_batch,
        units=units,
        expert_units=frozenset(experts),
        rest=_other_weights(model, stage, sequence),
        shared={"embedding": embedding_weight(model)} if shares_embedding else {},
        hidden_bytes=parts.hidden_bytes(S),
    )


def _layer(parts: LayerTraffic, S: int, index: int, *, in_module: bool = False) -> Traffic:
    """Counts the traffic of layer ``index``: forward, backward and recomputation; see ``LayerTraffic.layer``."""
    config, layout, attention = parts.config, parts.layout, parts.self_attention(S)
    if _has_experts(config.model, index):
        B = config.train.micro_batch_size
        batch = MicroBatch(B, S * B // layout.tensor, parts.dtype)
        layer = attention.whole + moe_traffic(config.model, config.parallel.dispatch, layout, batch)
        return layer.forward + layer.backward
    return parts.layer({"self_attn": attention, "mlp": parts.feed_forward(S)}, in_module=in_module)


def _layer_weights(model: TransformerConfig, tp_size: int, sequence: bool, index: int) -> list[Weight]:
    """Lists the weights of layer ``index`` except its experts."""
    feed_forward = moe_weights(model) if _has_experts(model, index) else None
    return layer_weights(model, tp_size, sequence, feed_forward=feed_forward)


def _module_weights(model: TransformerConfig, tp_size: int, sequence: bool, index: int) -> list[Weight]:
    """Lists the weights of a multi-token prediction module; every tp rank has its whole projection."""
    H = model.hidden_size
    num_norms = 2 if model.residual.norm_placement == "post" else 3
    joining = [*norm_weights(model, sequence) * num_norms, Weight((H, 2 * H), partial=sequence)]
    return [*_layer_weights(model, tp_size, sequence, index), *joining]


def _other_weights(model: TransformerConfig, stage: Stage, sequence: bool) -> list[Weight]:
    """Lists the weights of the stage outside its layers."""
    ends_in_norm = stage.has_head and model.residual.norm_placement != "post"
    found = norm_weights(model, sequence) if ends_in_norm else []
    if stage.has_embedding or (stage.has_head and _last_stage_embeds(model)):
        found.append(embedding_weight(model))
    if stage.has_head and not model.tie_word_embeddings:
        found.append(embedding_weight(model))  # the head has the same shape
    return [*found, *(position_weights(model, sequence) if stage.has_embedding else [])]


def _last_stage_embeds(model: TransformerConfig) -> bool:
    """Returns whether the stage of the head has the embedding, as tied weights or for multi-token prediction."""
    return model.tie_word_embeddings or model.mtp is not None


def _has_experts(model: TransformerConfig, layer: int) -> bool:
    return model.moe is not None and model.moe.has_experts(layer)
