"""Load workloads from Python files, model files and folders of transformers models; write starter files from templates."""
