"""to_device: a copy to a GPU is made from pinned memory, for which the host does not wait."""

import numpy as np
import pytest
import torch

from megalith.device_copy import to_device


def test_arrays_and_tensors_keep_their_values_and_dtype():
    for values in (np.arange(6, dtype=np.int32).reshape(2, 3), torch.arange(6, dtype=torch.int32).view(2, 3)):
        found = to_device(values, "cpu")
        assert found.dtype == torch.int32
        assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_a_copy_to_a_gpu():
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # about half a second
    before = torch.cuda.Event()
    before.record()
    found = to_device(torch.arange(1 << 20), "cuda")
    assert not before.query()
    assert found.sum().item() == (1 << 20) * ((1 << 20) - 1) // 2
