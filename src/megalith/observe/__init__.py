"""What a run tells about itself: records, timers, counted parameters and FLOPs. Knows no model, needs no torch."""
