"""The directory that the launcher puts on the PYTHONPATH of workers; see `sitecustomize`."""
