"""Activation checkpointing within a budget of bytes."""
