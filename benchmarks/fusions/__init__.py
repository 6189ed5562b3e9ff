"""Every fused operation compared with torch eager, torch.compile, Liger and Megatron-Core, on a CPU or a GPU."""
