"""Samplers: which recipe a study tries next."""
