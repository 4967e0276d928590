"""Layer 1: ONNX model to engine directory."""
