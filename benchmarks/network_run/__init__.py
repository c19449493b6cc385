"""The parts of `benchmarks/network.py`: the links, the workers, the schedule and the report."""
