"""Searching: what to try, in which order, in which process, and where it is kept."""
