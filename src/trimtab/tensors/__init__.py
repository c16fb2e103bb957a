"""Helpers for tensors and modules: nested values, the batch axis, weights, copies, comparison, precision."""
