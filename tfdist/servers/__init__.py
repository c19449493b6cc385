"""Processes that run TensorFlow's server for a chief: they serve until it ends, and the chief notices when one is lost."""
