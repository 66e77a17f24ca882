"""Benchmarks of fuser against eager PyTorch and its peers; run as `python -m bench` from the repository root."""
