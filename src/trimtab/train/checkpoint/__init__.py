"""Checkpoints of a run, and what a resumed run takes from them."""
