"""`tfdist run --nodes`: one supervisor a host, which agree over small messages through a coordinator on node 0's host.

Standard library only, JSON only: nothing that arrives is ever executed or unpickled.
"""
