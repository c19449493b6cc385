"""Changes single bits of variables, as faulty memory does."""

import numpy as np

from tfdist.keras_internals.model_state import components


def flip_bit(strategy, variable, device=0, bit=6):
    """Changes one bit of the first value of a float32 variable, on one device of this worker.

    A lower bit may be gone before the next comparison: an update rounds it away.
    """
    copy = components(strategy, variable)[device]
    bits = copy.numpy().view(np.uint32).copy()
    bits.reshape(-1)[0] ^= np.uint32(1 << bit)
    copy.assign(bits.view(np.float32))
