"""What a run reports about itself: metrics and dashboards, timers, progress, the machine. Independent of any model."""
