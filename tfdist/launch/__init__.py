"""`tfdist run`: starts the workers of one host, watches them, and says why a run failed. Never imports TensorFlow.

The entry point is `tfdist.launch.main:main`; `python -m tfdist.launch` is the same.
"""
