"""The sizes of a run's expert exchanges, before the model is built."""

from megalith.config import RunConfig
from megalith.parallel.expert.symmetric_a2a import ExchangeSizes
from megalith.training.build_model import DTYPES

__all__ = ["dispatched_size", "symmetric_sizes"]


def symmetric_sizes(config: RunConfig) -> ExchangeSizes | None:
    """Returns the buffer sizes of a micro-batch for dispatch.method=symmetric; None for other methods."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None or parallel.dispatch.method != "symmetric" or parallel.expert == 1:
        return None
    return ExchangeSizes(
        num_ranks=parallel.expert,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        max_tokens=config.train.micro_batch_size * config.data.seq_length // (parallel.context * parallel.tensor),
        size=dispatched_size(config),
        dtype=DTYPES[config.precision.dtype],
    )


def dispatched_size(config: RunConfig) -> int:
    """Returns the number of features per token that are sent to experts."""
    moe = config.model.moe
    return config.model.hidden_size if moe is None or moe.latent_size is None else moe.latent_size
