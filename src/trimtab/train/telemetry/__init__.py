"""What a run reports: meters, metrics, events, progress, the share of the machine's peak."""
