"""Private symbols of Keras: everything that reads, calls or replaces one. `keras_symbols` lists most of them."""
