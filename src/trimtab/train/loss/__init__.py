"""The loss: what a step calls, losses with parameters, parity of losses."""
