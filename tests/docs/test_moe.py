"""docs/moe.md: its routers match transformers, its table of bytes matches the counts, its replay example works."""

import re
from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megalith.acceleration.recompute import recompute_modules_
from megalith.config import load_run
from megalith.config.yaml_text import read_yaml
from megalith.models.gpt_model import GPTModel
from megalith.parallel.parameters import initialize_parameters_
from megalith.training.tasks.choose import task_of
from megalith.training.traffic import step_traffic
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.moe_layer import MoELayer
from megalith.transformer.moe.router import TopKRouter
from tests.docs.pages import page
from tests.docs.test_parallelism import value
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


ROWS = re.findall(r"^\| (\w*) ?\| (expert|expert_tensor) \| (\w+) \| `(.+?)` \| `(.+?)` \| .*\|$", page("moe.md"), re.M)


@pytest.mark.parametrize("method", ["all_to_all", "all_gather"])
def test_the_bytes_of_its_table_are_what_is_counted(method):
    tree = {
        "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 128},
        "data": {"train": "text", "seq_length": 32},
        "train": {"steps": 1, "global_batch_size": 48, "micro_batch_size": 2},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "precision": {"dtype": "bfloat16"},
        "parallel": {"expert": 4, "expert_tensor": 2, "dispatch": {"method": method}},
    }
    tree["model"]["moe"] = {"num_experts": 16, "top_k": 3, "latent_size": 24}
    letters = {"T": 64, "D": 24, "e": 2, "w": 4, "E": 16, "K": 3, "ep": 4, "etp": 2}
    num_micro_batches, wanted, of = 48 // 2 // 8, Counter(), ""
    for name, axis, kind, times, size in ROWS:
        of = name or of
        if of == method:
            wanted[axis, kind, value(size, letters)] += value(times, letters) * num_micro_batches
    config = load_run(tree, world_size=8)
    counted = step_traffic(config, task_of(config), 8, 3)
    found = {(each.axis, each.kind, each.num_bytes): times for each, times in counted.items()}
    assert wanted == {key: times for key, times in found.items() if key[0].startswith("expert")}


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_its_example_replays_the_experts_of_another_model_in_backward_too(again):
    [example] = re.findall(r"^```python\n(.*?)^```", page("moe.md"), re.M | re.S)
    first, second = (GPTModel(config(moe={"num_experts": 4}), options(), seed=seed) for seed in (1, 2))
    tokens, chosen = torch.arange(24).view(2, 12), []
    hooks = [
        router.register_forward_hook(lambda _router, _args, routing: chosen.append(routing.indices))
        for router in second.routers().values()
    ]
    if again:
        recompute_modules_(module for module in second.modules() if isinstance(module, MoELayer))
    second(tokens)
    own = chosen[:]
    chosen.clear()
    names = {"first": first, "second": second, "tokens": tokens}
    exec(example, names)
    names["logits"].square().mean().backward()
    assert len(chosen) == (4 if again else 2)
    recorded = names["recorded"]
    assert not any(torch.equal(mine, recorded[layer]) for layer, mine in enumerate(own))
    assert all(torch.equal(mine, recorded[layer]) for layer, mine in zip([0, 1, 1, 0], chosen, strict=False))
    for hook in hooks:
        hook.remove()
    assert all(router.weight.grad.any() for router in second.routers().values())
