"""The values and contracts of trimtab: workload, candidate, technique, backend, recipe, finding, check, trial."""
