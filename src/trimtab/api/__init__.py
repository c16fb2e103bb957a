"""The entry functions: optimize, tune, compare, verify."""
