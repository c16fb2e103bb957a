"""Save checkpoints of a training run, and resolve conflicts with the script on resume."""
