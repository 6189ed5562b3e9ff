"""initialization: the values of GPT-2's rule, and the weights that follow it."""

import pytest
import torch

from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.initialization import output_std
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.layer_spec import LayerSpec
from tests.transformer.shapes import config, options


def test_output_std_by_hand():
    assert output_std(config(init_method_std=0.02, num_layers=12)) == pytest.approx(0.02 / 4.898979485566356)
    assert output_std(config(init_method_std=1.0, num_layers=2)) == 0.5


def test_projections_into_the_residual_stream_begin_narrower_and_the_others_do_not():
    wide = config(hidden_size=256, ffn_hidden_size=256, num_attention_heads=2, init_method_std=0.02, num_layers=8)
    layer = TransformerLayer(wide, options(dtype=torch.float32), LayerSpec())
    initialize_parameters_(layer, seed=1)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1:
            continue
        std = 0.005 if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight") else 0.02
        # the standard error of a sample's standard deviation: std / sqrt(2 n)
        assert parameter.std().item() == pytest.approx(std, rel=5 / (2 * parameter.numel()) ** 0.5)
        assert parameter.mean().item() == pytest.approx(0.0, abs=5 * std / parameter.numel() ** 0.5)
