"""One copy of a model in a process of its own. Models of ONNX Runtime and OpenVINO run without torch."""
