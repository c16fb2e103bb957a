"""A PyTorch module from an ONNX file."""
