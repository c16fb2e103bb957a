"""One recipe evaluated: the prepared workload, the reference, fidelity, timing, confirmation."""
