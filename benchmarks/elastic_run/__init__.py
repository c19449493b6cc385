"""The workers of `benchmarks/elastic.py`."""
