"""The loss: how a step calls it, losses with parameters, and the comparison of two runs by their losses."""
