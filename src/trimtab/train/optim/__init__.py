"""Optimizer state and kernels, learning rates and schedules, weight averages."""
