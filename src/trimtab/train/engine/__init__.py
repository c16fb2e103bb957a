"""The engine of a run: setup, steps, epochs, validation, signals, retries."""
