"""Brings the project to a GPU host that has no network, and runs it there.

`python -m paged_trt.scripts.gpu_host --help` says how.
"""
