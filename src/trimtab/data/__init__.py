"""A workload's data: readers, batches, splits, which axis counts examples, which sizes are dynamic, scores."""
