"""Losses of replicas: what they are means and sums of, and what each counts for the whole batch."""
