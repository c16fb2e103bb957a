"""The functions optimize, tune, compare and verify."""
