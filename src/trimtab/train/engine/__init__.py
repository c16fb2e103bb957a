"""What drives a run: setup, steps, epochs, validation, signals, retries."""
