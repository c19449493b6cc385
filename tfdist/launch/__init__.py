"""`tfdist run`: starts the workers of one host, watches them, starts them again, and says why a run failed.

The launcher never imports TensorFlow; a warm spare, which is a worker to be, does (`spare_main.py`).

The entry point is `tfdist.launch.main:main`; `python -m tfdist.launch` is the same.
"""
