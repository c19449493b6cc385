"""Load balancing: which rows of a global batch each worker computes, by measured speed or by hand."""
