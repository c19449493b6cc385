"""The parts of `benchmarks/gpu.py`: the machine, the processes, the programs that they run, and the cases."""
