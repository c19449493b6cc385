"""Pipelines of stages: partition of a model, placement, schedule, step and update."""
