"""Small dense ONNX models to try Paged TRT on: a random toy and SmolLM2-135M-Instruct."""
