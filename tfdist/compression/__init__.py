"""Compression of gradients: methods, error feedback, and the policy that chooses a method for each variable.

>>> from tfdist.compression import Policy, PowerSGD, TopK
>>> from tfdist.strategies import MirroredStrategy
>>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression=PowerSGD(rank=4))
>>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression={"embedding": TopK(0.01), ".*": "bf16"})
>>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression=Policy("powersgd:4", dense_steps=100))
"""

from tfdist.compression.block_compressor import BlockCompressor
from tfdist.compression.cast import Cast
from tfdist.compression.compressor import Compressor, Dense, Group, Reduced
from tfdist.compression.policy import Policy, get
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.quantization import Quantize, Sign
from tfdist.compression.sparsification import RandomK, TopK
from tfdist.compression.wrappers import ErrorFeedback, MomentumCorrection, WarmUp

__all__ = [
    "BlockCompressor",
    "Cast",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "Group",
    "MomentumCorrection",
    "Policy",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Reduced",
    "Sign",
    "TopK",
    "WarmUp",
    "get",
]
