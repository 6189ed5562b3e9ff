"""docs/moe.md: the routers of published models route as transformers' own."""

import re

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megalith.config.yaml_text import read_yaml
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.router import TopKRouter
from tests.docs.pages import page
from tests.transformer.shapes import config, options

H = 16
THEIRS: dict[str, tuple[type[nn.Module], str, dict[str, object]]] = {
    "mixtral": (MixtralTopKRouter, "MixtralConfig", {}),
    "qwen3_moe": (Qwen3MoeTopKRouter, "Qwen3MoeConfig", {"norm_topk_prob": True}),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        "DeepseekV2Config",
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    ),
    "deepseek_v3": (DeepseekV3TopkRouter, "DeepseekV3Config", {}),
    "gpt_oss": (GptOssTopKRouter, "GptOssConfig", {}),
}
BLOCKS = dict(re.findall(r"^```yaml\n# (\w+)\n(.*?)^```", page("moe.md"), re.M | re.S))


def test_the_page_has_all_of_them():
    assert BLOCKS.keys() == THEIRS.keys()


@pytest.mark.parametrize("model", THEIRS)
def test_the_router_on_the_page_routes_as_that_of_transformers(model):
    moe = read_yaml(BLOCKS[model], model)
    ours = TopKRouter(config(moe=moe), options(dtype=torch.float32), 0).eval()
    initialize_parameters_(ours, seed=1)
    kind, settings, changes = THEIRS[model]
    E, K = moe["num_experts"], moe["top_k"]
    experts = {"num_experts_per_tok": K, "num_local_experts": E, "num_experts": E, "n_routed_experts": E}
    theirs = kind(getattr(transformers, settings)(hidden_size=H, num_attention_heads=4, **experts, **changes))
    with torch.no_grad():
        if ours.e_score_correction_bias is not None:
            ours.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, E))
        if ours.bias is not None:
            ours.bias.copy_(torch.linspace(-1.0, 1.0, E))
    theirs.load_state_dict(ours.state_dict())

    x = torch.randn(50, 2, H, generator=torch.Generator().manual_seed(0))
    routing = ours(x, LayerContext())
    _, weights, indices = theirs(x.view(100, H))
    order = indices.sort(dim=1).indices
    mine = routing.indices.sort(dim=1).indices
    assert torch.equal(routing.indices.gather(1, mine), indices.gather(1, order))
    torch.testing.assert_close(routing.weights.gather(1, mine), weights.gather(1, order), rtol=1e-5, atol=1e-6)
