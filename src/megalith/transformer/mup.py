"""muP: how initial weights, learning rates and AdamW's eps scale with the width n of a model, by parameter name.

    kind of weight                                           std         learning rate   eps
    embedding, positions, output projection; vectors         1           1               1 / n
    matrices from one width to another                       1 / sqrt n  1 / n           1 / n
    output of fixed size: experts' scores and gates, classes 1 / n       1 / n           1

n is hidden_size / base_hidden_size, and each entry is a factor on the value chosen at the base width. The model
multiplies its logits by 1 / n, which scales all gradients but those of the last row; eps, which AdamW adds to the root
of their second moment, is scaled in the same way. Weight decay is divided by the factor on the learning rate, so that a
step shrinks a weight by the same fraction at every width.

Source: Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table 8, which allows tied embeddings; the last row is
from table 3; appendix B.3 for eps and weight decay.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from megalith.config import TransformerConfig
from megalith.optim.rate_factors import RateFactors
from megalith.parallel.parameters import DeclaringModule, ParameterSpec

__all__ = ["WidthFactors", "rate_factors", "scale_first_weights_", "width_factors"]

_FROM_OR_TO_TOKENS = (
    "model.embed_tokens.weight",
    "model.embed_positions.weight",
    "model.embed_token_types.weight",
    "lm_head.weight",
)
# [E, H] of a router, [1, H] of shared experts, [classes, H]
_OUTPUT_OF_FIXED_SIZE = (".gate.weight", "binary_head.linear.weight", "classifier.linear.weight")


@dataclass(frozen=True)
class WidthFactors:
    """The factors for one parameter: on the standard deviation of its initial values, and on its rates."""

    std: float
    rates: RateFactors


def width_factors(config: TransformerConfig, name: str, spec: ParameterSpec) -> WidthFactors:
    """Returns the factors for the parameter ``name``; all are 1 without muP."""
    width = config.width
    if len(spec.shape) == 1 or name.endswith("bias") or name in _FROM_OR_TO_TOKENS:
        return WidthFactors(1.0, RateFactors(eps=1.0 / width))
    if name.endswith(_OUTPUT_OF_FIXED_SIZE):
        return WidthFactors(1.0 / width, RateFactors(lr=1.0 / width))
    return WidthFactors(1.0 / math.sqrt(width), RateFactors(lr=1.0 / width, eps=1.0 / width))


def scale_first_weights_(model: nn.Module, config: TransformerConfig) -> None:
    """Scales the declared initial standard deviation of every parameter by its width factor, before initialization."""
    for path, module in model.named_modules():
        if isinstance(module, DeclaringModule):
            for name, spec in module.parameter_specs.items():
                factors = width_factors(config, f"{path}.{name}", spec)
                module.parameter_specs[name] = replace(spec, std=spec.std * factors.std)


def rate_factors(
    declared: Iterable[tuple[str, nn.Parameter, ParameterSpec]], config: TransformerConfig
) -> dict[nn.Parameter, RateFactors]:
    """Returns the factors on the rates of each parameter."""
    return {parameter: width_factors(config, name, spec).rates for name, parameter, spec in declared}
