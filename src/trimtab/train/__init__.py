"""Training: a loop that is fast by default, right in the corners, and can be cut off at any time."""
