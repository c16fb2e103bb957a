"""Optimizers' state and kernels, learning rates and schedules, averages of weights."""
