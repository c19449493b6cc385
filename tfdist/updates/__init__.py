"""The order of an optimizer's update, and clipping, whoever holds gradients, accumulators and weights.

`WholeUpdate` is for replicas that hold all of them; `sharded_state` and `pipeline` have the other holders.
"""
