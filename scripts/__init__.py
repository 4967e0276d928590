"""Layer 2: the command line, demos and benchmarks."""
