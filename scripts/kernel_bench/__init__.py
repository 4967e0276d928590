"""Kernel benchmarks: cells, ceilings, our kernels, other libraries, tables and pictures."""
