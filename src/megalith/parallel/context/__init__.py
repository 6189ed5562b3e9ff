"""Context parallelism: the sequence split over ranks, and attention between the parts."""
