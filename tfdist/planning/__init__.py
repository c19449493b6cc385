"""Predicts how fast, and within which memory, a program trains under each strategy. Pure functions, without TensorFlow."""
