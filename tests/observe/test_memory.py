"""Peak memory, compared with the operating system's numbers for the process."""

import re
import sys
from pathlib import Path

import pytest
import torch

from megalith.observe.memory import peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_on_a_cpu_it_is_the_high_water_mark_of_the_process():
    found = peak_memory(torch.device("cpu"))
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found == pytest.approx(1024 * int(kib), rel=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_what_tensors_took():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1 << 20, device="cuda")
    assert peak_memory(tensor.device) >= before + 4 * (1 << 20)
