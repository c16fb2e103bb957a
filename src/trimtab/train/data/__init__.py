"""From a dataset to micro-batches on the device."""
