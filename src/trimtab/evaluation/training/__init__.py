"""One recipe of a training evaluated: the workload, timed updates, the trial."""
