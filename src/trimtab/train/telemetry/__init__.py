"""Reports of a run: meters, metrics, events, progress, model FLOPs utilization."""
