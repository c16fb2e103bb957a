"""The server: one front process that never imports torch, and one process per copy of a model."""
