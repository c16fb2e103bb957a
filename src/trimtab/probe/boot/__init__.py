"""The folder that stands first on PYTHONPATH of a watched process: Python imports ``sitecustomize`` from it at start-up."""
