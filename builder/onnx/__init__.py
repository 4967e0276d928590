"""ONNX in: loading, the dialects, the rewrite to PagedAttention and its lowering."""
