"""Scripts as they are: watched, measured with remedies applied from outside, and run with those that pay."""
