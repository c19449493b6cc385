"""Processes that run TensorFlow's server for a chief, until it ends, and how the chief notices that one is lost."""
