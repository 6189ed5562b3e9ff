"""How wide first weights are."""

import math

from megalith.config import TransformerConfig

__all__ = ["output_std"]


def output_std(config: TransformerConfig) -> float:
    """Standard deviation of the two projections of a layer that add to the residual stream: std / sqrt(2 L).

    So that its variance does not grow with depth. Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners", section 2.3.
    """
    return config.init_method_std / math.sqrt(2 * config.num_layers)
