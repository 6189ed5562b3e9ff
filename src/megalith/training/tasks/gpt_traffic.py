"""What a stage of a GPT exchanges for a micro-batch, in closed form, and its weights; X is [S/cp, B, H] in bytes.

    embedding   leaves tensor parallelism                                            1 X
    layer       attention and feed-forward each enter and leave tensor parallelism   4 X
                latent attention enters with its latents in place of X, or with X and one of them
                between q, k, v and o, attention over context
                of experts, see transformer.moe.traffic
    head        enters tensor parallelism                                            1 X
                the loss gathers three numbers of each token
    module      of multi-token prediction: an embedding, a layer and a head each             6 X

With sequence parallelism each X is exchanged forward and backward: an all-gather one way, a reduce-scatter the other.
Without, it is one all-reduce: of what leaves in forward, of what enters in backward. Recomputation repeats the forward
of layers, or of the parts that a run names, as far as backward needs it.
"""

from megalith.config import MLAConfig, RunConfig, TransformerConfig
from megalith.config.layout import Layout
from megalith.errors import ConfigError
from megalith.models.language_model import hidden_dtype
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.context.traffic import attention_traffic
from megalith.parallel.sharding.traffic import Weight
from megalith.parallel.tensor.cross_entropy import loss_traffic
from megalith.parallel.tensor.regions import enter_traffic, leave_traffic
from megalith.parallel.traffic import Passes, Traffic
from megalith.training.build_model import DTYPES
from megalith.training.tasks.task import StageTraffic
from megalith.transformer.moe.traffic import MicroBatch, expert_weights, moe_traffic, moe_weights
from megalith.transformer.stage import Stage

__all__ = ["gpt_traffic"]


def gpt_traffic(config: RunConfig, layout: Layout, stage: Stage) -> StageTraffic:
    """The traffic of ``stage`` on each rank of ``layout`` that holds it; of experts as of even loads.

    Raises:
        ConfigError: what experts exchange is not counted, where they are computed again or travel through DeepEP.
    """
    if config.model.moe is not None and config.train.recompute != "none":
        raise ConfigError("what layers with experts exchange is not counted with train.recompute")
    model, dtype, tp = config.model, DTYPES[config.precision.dtype], layout.tensor
    sequence = config.parallel.sequence
    num_tokens = config.data.seq_length // layout.context * config.train.micro_batch_size
    X = num_tokens * model.hidden_size * dtype.itemsize  # [S/cp, B, H]
    hidden_bytes = num_tokens * model.hidden_size * hidden_dtype(model, dtype).itemsize
    whole = Passes()
    if stage.has_embedding:
        whole += leave_traffic(X, tp, sequence)
    head = enter_traffic(X, tp, sequence) + loss_traffic(num_tokens, dtype, tp)
    if stage.has_head:
        whole += head
    micro_batch = whole.forward + whole.backward
    units, experts = list[list[Weight]](), set[int]()
    for layer in stage.layers:
        micro_batch += _layer(config, layout, X, layer)
        if _has_experts(model, layer):
            experts.add(len(units))
            units.append(expert_weights(model))
        units.append(_layer_weights(model, tp, sequence, layer))
    if model.mtp is not None and stage.has_head:
        around = leave_traffic(X, tp, sequence) + head
        for layer in range(model.num_layers, model.num_layers + model.mtp.num_modules):
            micro_batch += around.forward + around.backward + _layer(config, layout, X, layer, in_module=True)
            if _has_experts(model, layer):
                experts.add(len(units))
                units.append(expert_weights(model))
            units.append(_module_weights(model, tp, sequence, layer))
    shares_embedding = _last_stage_embeds(model) and stage.has_embedding != stage.has_head
    return StageTraffic(
        micro_batch,
        units=units,
        expert_units=frozenset(experts),
        rest=_other_weights(model, stage, sequence),
        shared=[_embedding(model)] if shares_embedding else [],
        hidden_bytes=hidden_bytes // tp if sequence else hidden_bytes,
    )


def _layer(config: RunConfig, layout: Layout, X: int, index: int, *, in_module: bool = False) -> Traffic:
    """What the layer ``index`` exchanges, forward, backward, and to compute again.

    ``in_module``: of multi-token prediction, which goes on after it.
    """
    model, parallel = config.model, config.parallel
    enter, leave = (part(X, layout.tensor, parallel.sequence) for part in (enter_traffic, leave_traffic))
    S, B, D = config.data.seq_length // layout.context, config.train.micro_batch_size, model.kv_channels
    begin = enter
    if model.mla is not None:  # queries, then keys and values
        read = model.hidden_size if model.mla.q_lora_rank is None else model.mla.q_lora_rank
        widths = read, model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        of_queries, of_keys = (
            enter_traffic(X // model.hidden_size * width, layout.tensor, parallel.sequence) for width in widths
        )
        begin = of_queries + of_keys
    core = attention_traffic(
        (S, B, model.num_attention_heads // layout.tensor, D),
        (S, B, max(model.num_query_groups // layout.tensor, 1), D),
        D if model.mla is None else model.mla.v_head_dim,
        DTYPES[config.precision.dtype],
        ContextMethod(parallel.context_method, parallel.context_inner or 1),
        layout.context,
        drops=model.attention_dropout > 0.0,
    )
    if _has_experts(model, index):
        batch = MicroBatch(B, S * B // layout.tensor, DTYPES[config.precision.dtype])
        layer = begin + core + leave + moe_traffic(model, parallel.dispatch, layout, batch)
        return layer.forward + layer.backward
    layer = begin + core + leave + enter + leave
    return layer.forward + layer.backward + _recomputed(config, begin, enter, core, leave, in_module=in_module)


def _recomputed(
    config: RunConfig, begin: Passes, enter: Passes, core: Passes, leave: Passes, *, in_module: bool
) -> Traffic:
    """What a layer exchanges once more because backward computes some of it again."""
    attention, mlp, names = begin + core + leave, enter + leave, config.train.recompute_modules
    if config.train.recompute == "none":
        return Traffic()
    if config.train.recompute == "full":
        layer = attention + mlp
        # dropout at the layer's end saves its mask, and a norm there or after it what it reads
        norm_follows = in_module or config.model.residual.norm_placement != "pre"
        saves_last = config.model.hidden_dropout > 0.0 or norm_follows
        return layer.forward if saves_last else layer.recomputed
    again = core.recomputed if "core_attn" in names else Traffic()
    for name, block, entered in (("self_attn", attention, begin), ("mlp", mlp, enter)):
        if name in names:
            again += block.recomputed
        elif "layernorm" in names:
            again += entered.forward  # the norm's output is kept before it is gathered, or not at all
    return again


def _layer_weights(model: TransformerConfig, tp_size: int, sequence: bool, index: int) -> list[Weight]:
    """Those of the layer ``index`` but for its experts.

    What ranks of tp use on their own tokens, or for heads of their own, has partial gradients.
    """
    H, F = model.hidden_size, model.ffn_hidden_size
    fc1 = [Weight((F, H), split=0)] * (1 if model.gate_activation is None else 2)
    biases = [Weight((F,), split=0)] * len(fc1) if model.mlp_bias else []
    biases += [Weight((H,), partial=sequence)] * model.mlp_bias
    mlp = moe_weights(model) if _has_experts(model, index) else [*fc1, Weight((H, F), split=1), *biases]
    attention = _attention_weights(model, tp_size) if model.mla is None else _latent_weights(model, model.mla, sequence)
    output_bias = [Weight((H,), partial=sequence)] * model.output_bias
    num_norms = 4 if model.residual.norm_placement == "sandwich" else 2
    return [*attention, *output_bias, *mlp, *_norm(model, sequence) * num_norms]


def _attention_weights(model: TransformerConfig, tp_size: int) -> list[Weight]:
    """Those of attention in a layer, but for the bias of its output."""
    H, A, G, D = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.kv_channels
    heads_are_shared = G % tp_size != 0
    key = Weight((G * D, H), split=None if heads_are_shared else 0, partial=heads_are_shared)
    reads_queries = 2 if model.attention.output_gate else 1
    qkv = [*[Weight((A * D, H), split=0)] * reads_queries, key, key]
    biases = [Weight(column.shape[:1], column.split, column.partial) for column in qkv] if model.qkv_bias else []
    return [*qkv, Weight((H, A * D), split=1), *biases, *_of_heads(model)]


def _latent_weights(model: TransformerConfig, mla: MLAConfig, sequence: bool) -> list[Weight]:
    """``_attention_weights`` of latent attention: what comes before the heads is whole on every rank of tp."""
    H, A, D = model.hidden_size, model.num_attention_heads, model.kv_channels
    heads = [
        Weight((A * D, mla.q_lora_rank or H), split=0),
        Weight((A * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank), split=0),
        Weight((H, A * mla.v_head_dim), split=1),
    ]
    latents = [(mla.kv_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim)]
    if mla.q_lora_rank is not None:
        latents.append((mla.q_lora_rank, mla.q_lora_rank))
    whole: list[Weight] = []
    for size, width in latents:
        whole += [Weight((width, H), partial=sequence)]
        whole += [Weight((width,), partial=sequence)] * model.qkv_bias
        whole += _norm(model, sequence, size)
    return [*heads, *whole]


def _of_heads(model: TransformerConfig) -> list[Weight]:
    """Norms of queries and keys, which ranks of tp use for heads of their own, and learned sinks."""
    norms = [Weight((model.kv_channels,), partial=True)] * (2 * len(model.attention.norm_parameters))
    sinks = [Weight((model.num_attention_heads,), split=0)] if model.attention.softmax == "learnable" else []
    return [*norms, *sinks]


def _module_weights(model: TransformerConfig, tp_size: int, sequence: bool, index: int) -> list[Weight]:
    """Those of a module of multi-token prediction; its projection is whole on every rank of tp."""
    H = model.hidden_size
    num_norms = 2 if model.residual.norm_placement == "post" else 3
    joining = [*_norm(model, sequence) * num_norms, Weight((H, 2 * H), partial=sequence)]
    return [*_layer_weights(model, tp_size, sequence, index), *joining]


def _other_weights(model: TransformerConfig, stage: Stage, sequence: bool) -> list[Weight]:
    """Those of the stage that are in no layer."""
    ends_in_norm = stage.has_head and model.residual.norm_placement != "post"
    found = _norm(model, sequence) if ends_in_norm else []
    if stage.has_embedding or (stage.has_head and _last_stage_embeds(model)):
        found.append(_embedding(model))
    if stage.has_head and not model.tie_word_embeddings:
        found.append(_embedding(model))  # the head has the same shape
    if stage.has_embedding and model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings is not None, "a run that is loaded has it with learned positions"
        found.append(Weight((model.max_position_embeddings, model.hidden_size), partial=sequence))
    return found


def _last_stage_embeds(model: TransformerConfig) -> bool:
    """Whether the stage of the head has the embedding: as its weight, or for multi-token prediction."""
    return model.tie_word_embeddings or model.mtp is not None


def _has_experts(model: TransformerConfig, layer: int) -> bool:
    return model.moe is not None and model.moe.has_experts(layer)


def _norm(model: TransformerConfig, sequence: bool, size: int | None = None) -> list[Weight]:
    return [Weight((model.hidden_size if size is None else size,), partial=sequence)] * (
        2 if model.normalization == "LayerNorm" else 1
    )


def _embedding(model: TransformerConfig) -> Weight:
    assert model.vocab_size is not None, "preflight has settled it"
    return Weight((model.vocab_size, model.hidden_size), split=0)
