"""Shared code of the passes. The scan for passes skips this folder."""
