"""The only room that touches private Keras symbols: `symbols` lists them with their reasons."""
