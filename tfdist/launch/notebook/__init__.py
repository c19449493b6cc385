"""`from_notebook`: runs a function, such as one of a notebook cell, on several workers."""
