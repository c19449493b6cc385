"""Local updates: workers train by themselves and exchange differences of weights after many updates.

Sources: Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023, "DiLoCo: Distributed
Low-Communication Training of Language Models"; 2025, "Streaming DiLoCo with overlapping communication".
"""
