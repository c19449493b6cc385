"""Optimizer state that is split over the replicas: which part each owns, the exchange, and the update of the own part.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1.
"""
