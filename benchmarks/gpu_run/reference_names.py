"""The trainings that also run in one process; apart from `trainings`, which imports TensorFlow."""

REFERENCES = ("convolutions", "adam", "mixed_float16", "mixed_bfloat16", "overflow")
