"""Benchmarks: one file each, found by the `bench` command group."""
