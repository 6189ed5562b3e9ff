"""Peak FLOPs: known devices by their names, and nothing guessed for others."""

import pytest
import torch

from megalith.observe.peak import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("Some later device", None),
    ],
)
def test_a_device_is_known_by_its_name(name, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    flops = peak_flops(torch.device("cuda"), "bfloat16")
    assert flops == (None if teraflops is None else teraflops * 1e12)


def test_a_cpu_and_float32_have_no_figure():
    assert peak_flops(torch.device("cpu"), "bfloat16") is None
    assert peak_flops(torch.device("cuda"), "float32") is None
