"""Choose settings that are "auto", micro-batch sizes and loader workers, by timing real updates."""
