"""Private symbols of TensorFlow: everything that reads, calls or replaces one. `tensorflow_symbols` lists most."""
