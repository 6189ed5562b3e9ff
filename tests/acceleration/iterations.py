"""Iterations for tests of ``FullCudaGraph``, on a CPU and on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.acceleration.full_cuda_graph import FullCudaGraph
from megalith.config import TransformerConfig
from megalith.models.gpt_model import GPTModel
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["CPU", "DEVICES", "NEEDS_GPU", "B", "Linear", "S", "V", "gpt", "inputs"]

CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(torch.device("cuda"), id="cuda", marks=NEEDS_GPU)]
V, S, B = 97, 32, 2


class Linear:
    """An iteration of ``x @ weight``, which counts how often its Python runs and where its input is."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.weight = nn.Parameter(torch.arange(6.0, device=device).view(2, 3) + 1.0)
        self.addresses: list[int] = []

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        self.addresses.append(x.data_ptr())
        y = (x.to(self.weight.dtype) @ self.weight).square().sum()
        y.backward()
        return y

    def graph(self, **kwargs: Any) -> FullCudaGraph:
        return FullCudaGraph(self, [self.weight], self.weight.device, **kwargs)

    def check(self, found: Tensor, x: Tensor) -> None:
        """Checks the result and the gradient for ``x``, and drops the gradient."""
        y = x @ self.weight.detach()
        torch.testing.assert_close(found, y.square().sum())
        torch.testing.assert_close(self.weight.grad, 2 * x.t() @ y)
        self.weight.grad = None


def inputs(num: int, *shape: int, device: torch.device = CPU) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator).to(device) for _ in range(num))


def gpt(device: torch.device, **fields: Any) -> GPTModel:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": V, "ffn_hidden_size": 48}
    config = TransformerConfig.model_validate(sizes | fields)
    torch.manual_seed(0)
    with torch.device(device):
        return GPTModel(config, BuildOptions(ProcessGroupCollection.single(), torch.float32))
