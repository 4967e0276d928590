"""Ordinary ONNX models to try Paged TRT with."""
