"""The only room that touches private TensorFlow symbols: `symbols` lists them with their reasons."""
