"""The command line `tfdist` and its sub-commands."""
