"""How large the exchanges of a run's experts are, before anything of it is built."""

from megalith.config import RunConfig
from megalith.parallel.expert.symmetric_a2a import ExchangeSizes
from megalith.training.build_model import DTYPES

__all__ = ["symmetric_sizes", "travelling_size"]


def symmetric_sizes(config: RunConfig) -> ExchangeSizes | None:
    """Those of the buffers that every rank has under dispatch.method=symmetric, for a micro-batch; None without it."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None or parallel.dispatch.method != "symmetric" or parallel.expert == 1:
        return None
    return ExchangeSizes(
        num_ranks=parallel.expert,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        max_tokens=config.train.micro_batch_size * config.data.seq_length // (parallel.context * parallel.tensor),
        size=travelling_size(config),
        dtype=DTYPES[config.precision.dtype],
    )


def travelling_size(config: RunConfig) -> int:
    """The features of a token on its way to experts."""
    moe = config.model.moe
    return config.model.hidden_size if moe is None or moe.latent_size is None else moe.latent_size
