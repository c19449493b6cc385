"""Predicts how fast, and in which memory, a program trains under each strategy. Pure functions, without TensorFlow."""
