"""Shared code of the backends, also for plug-ins: export, conversion, and comparison of a graph with the model."""
