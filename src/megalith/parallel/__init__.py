"""How work is split over ranks: tensor, sequence, context, expert, pipeline and sharded data parallelism."""
