"""The parts of `benchmarks/model_parallel.py`: its workers in both frameworks, the measurements and the report."""
