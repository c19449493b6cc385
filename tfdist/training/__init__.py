"""How a Keras step and its optimizer run on many replicas: sample shares, the order of an update, shared state."""
