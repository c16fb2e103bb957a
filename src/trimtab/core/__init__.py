"""Values and contracts: workload, candidate, technique, backend, recipe, finding, check, trial."""
