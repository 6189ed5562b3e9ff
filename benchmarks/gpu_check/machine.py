"""The machine: versions, copy bandwidth, matmul rate, launch overhead."""

import importlib.util
import time

import torch
import triton
import triton.language as tl

from benchmarks.environment import describe
from benchmarks.fusions.clock import Clock, copy_bandwidth, product_rate
from benchmarks.restartable import Item, Line

__all__ = ["copies", "items", "launches", "products", "versions"]

_NUM_LAUNCHES = 100


def items(tiny: bool) -> dict[str, list[Item]]:
    """Items by the name of a job in this module."""
    device = "cpu" if tiny else "cuda"
    return {
        "versions": [Item("versions", ())],
        "copies": [Item("copy", (1 << 20 if tiny else 4 << 30, device))],
        "products": [Item("product", (device,))],
        "launches": [Item("empty launch", (device,))],
    }


def versions() -> Line:
    """Versions of packages, and properties of the GPU."""
    found = {**describe(), "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    peers = {name: importlib.util.find_spec(name) is not None for name in ("liger_kernel", "megatron", "transformers")}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "bytes": gpu.total_memory}
        found["cudnn"] = torch.backends.cudnn.version()
    return {**found, "peers": [name for name, is_there in peers.items() if is_there]}


def copies(num_bytes: int, device: str) -> Line:
    return {"bytes_per_second": copy_bandwidth(Clock(device), device, num_bytes)}


def products(device: str) -> Line:
    return {"flops_per_second": product_rate(Clock(device), device)}


@triton.jit
def _nothing(x_ptr, N: tl.constexpr):
    pass


def launches(device: str) -> Line:
    """Host seconds to launch a kernel that does nothing."""
    x = torch.zeros(1, device=device)
    _nothing[(1,)](x, N=1)
    start = time.perf_counter()
    for _ in range(_NUM_LAUNCHES):
        _nothing[(1,)](x, N=1)
    return {"host_seconds": (time.perf_counter() - start) / _NUM_LAUNCHES}
