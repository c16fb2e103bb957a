"""Jobs of worker processes."""
