"""The workers of `benchmarks/local_updates.py`."""
