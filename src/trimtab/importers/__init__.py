"""Where workloads come from besides the constructor: Python files, model files, folders of transformers models, templates."""
