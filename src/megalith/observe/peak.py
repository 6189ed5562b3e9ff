"""Peak FLOP/s of devices, for the model FLOPs utilization (MFU)."""

import torch

__all__ = ["peak_flops"]

# dense matmuls in bfloat16 and float16, FLOP/s, from the vendors' data sheets; the first matching name counts
_HALF_PRECISION = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of ``device`` in matmuls of ``dtype``; None if unknown, as on a CPU or in float32.

    float32 has no single figure, because it depends on whether TF32 is allowed.
    """
    if device.type != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _HALF_PRECISION if part in name), None)
