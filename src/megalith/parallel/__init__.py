"""How work is split over ranks: tensor parallelism and sharded data parallelism."""
