"""Measures a program and a machine for `tfdist plan`. Child processes import TensorFlow; this package does not."""
