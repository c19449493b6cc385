"""`tfdist run --nodes`: one supervisor per host; the supervisors agree through a coordinator on node 0.

Standard library only, and only JSON messages: nothing that arrives is executed or unpickled.
"""
