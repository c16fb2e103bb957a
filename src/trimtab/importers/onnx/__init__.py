"""Import ONNX files as PyTorch modules."""
