"""Standard deviations of initial weights."""

import math

from megalith.config import TransformerConfig

__all__ = ["output_std"]


def output_std(config: TransformerConfig) -> float:
    """Returns std / sqrt(2 L), the standard deviation for a layer's two projections that add to the residual stream.

    It keeps the variance of the residual stream from growing with depth. Radford et al. 2019, "Language Models are
    Unsupervised Multitask Learners", section 2.3.
    """
    return config.init_method_std / math.sqrt(2 * config.num_layers)
