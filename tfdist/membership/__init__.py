"""Which workers train together: what they agree on when one is lost, leaves or joins, and what becomes of its step.

Sockets and plain Python: it does not import TensorFlow.
"""
