"""`on_ray`, `on_spark` and `on_dask`: run a function on workers in the places that an engine gives.

An engine gives places: some of its processes, one for each worker, at the same time. In each place `tfdist run`
supervises one worker (`place.py`), as one node of several: the rendezvous in place 0 collects addresses and ports, sets
TF_CONFIG, and restarts workers. `engine_call.py` is what a user asks for, and what the driver does when places
are lost. An adapter for an engine (`on_*.py`) only asks for places, calls `run_place` in each, and stops them.
"""
