"""Context parallelism: the sequence is split over ranks, with attention across the parts."""
