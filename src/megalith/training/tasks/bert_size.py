"""The training cost of a BERT row, in closed form from the settings.

Layers cost as in ``gpt_size``, with attention to all S positions. For a row of S tokens of which P are predicted, the
head costs 3 x 2 P (H H + V H), the pooler with its head 3 x 2 (H H + C H), for V words and C classes, and the
projection of N embeddings of size D 3 x 2 N D H. The similarities of embeddings are not counted: they depend on the
batch size.
"""

from megalith.config import TransformerConfig
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.training.tasks.gpt_size import layer_flops

__all__ = ["bert_costs", "bert_flops_per_row"]


def bert_flops_per_row(config: TransformerConfig, vocab_size: int, seq_length: int, num_predicted: float) -> int:
    """Returns model FLOPs of training on a row of ``seq_length`` tokens, with ``num_predicted`` masked on average."""
    costs = bert_costs(config, vocab_size, seq_length, num_predicted)
    return sum(costs.layers) + costs.embedding + costs.head


def bert_costs(
    config: TransformerConfig, vocab_size: int, seq_length: int, num_predicted: float, num_texts: int = 1
) -> ModelCosts:
    """Returns ``bert_flops_per_row`` by part; looking up embeddings costs 0.

    ``num_texts``: texts in a row that the head embeds.
    """
    assert config.bert is not None, "the model is a BERT"
    H, bert = config.hidden_size, config.bert
    layers = [seq_length * layer_flops(config, index, seq_length, causal=False) for index in range(config.num_layers)]
    predicted = round(6 * num_predicted * (H * H + vocab_size * H)) if bert.head == "pretraining" else 0
    num_scores = bert.num_text_scores
    of_texts = 6 * (H * H + num_scores * H) if num_scores else 0
    if bert.head == "embedding" and bert.embedding_size is not None:
        of_texts = 6 * num_texts * bert.embedding_size * H
    return ModelCosts(tuple(layers), embedding=0, head=predicted + of_texts)
