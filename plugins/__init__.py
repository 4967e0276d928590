"""Layer 0: the KV pool contract, the op's specification, the kernels and the plugin."""
