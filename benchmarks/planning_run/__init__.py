"""The parts of `benchmarks/planning.py`: the program, its predictions, the comparison and the plot."""
