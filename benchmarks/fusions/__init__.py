"""Every fused operation beside torch eager, torch.compile, Liger and Megatron-Core, on a CPU or a GPU."""
