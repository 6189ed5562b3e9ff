"""Who sits where: ranks and axes, process groups made when first needed, and the collectives that autograd knows."""
