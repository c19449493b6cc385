"""Helpers that several packages share: formatting, argument checks, atomic files, JSON. Imports no TensorFlow."""
