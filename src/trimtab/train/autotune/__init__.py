"""What decides settings that are "auto"."""
