"""How many devices share a stage, in checkpoints of the compression state: residuals fit no other number."""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_KEY = "saved_ways/.ATTRIBUTES/py_state"


class SavedWays(tf.train.experimental.PythonState):
    """The number of devices of a stage, which `tf.train.Checkpoint` saves, and compares when it restores."""

    def __init__(self, ways: Callable[[], int], has_state: Callable[[], bool]) -> None:
        """Saves what the functions return.

        Args:
            ways: The number of devices that share a stage.
            has_state: Whether compressors keep a state. Without one any number fits.
        """
        super().__init__()
        self._ways, self._has_state = ways, has_state

    def serialize(self) -> str:
        """Returns the number, or 0 without a state."""
        return json.dumps(self._ways() if self._has_state() else 0)

    def deserialize(self, string_value: Any) -> None:
        """Compares the number at the checkpoint with the present one.

        Raises:
            ValueError: They differ.
        """
        check_ways(json.loads(string_value), self._ways())


def saved_ways(reader: Any) -> int:
    """Returns the number in a checkpoint; 0 if it has none, as those of earlier releases."""
    found = [key for key in reader.get_variable_to_shape_map() if key.endswith(_KEY)]
    return int(json.loads(reader.get_tensor(found[0]))) if found else 0


def check_ways(saved: int, present: int) -> None:
    """Raises a ValueError if the residuals of a checkpoint, if there are any, do not fit the devices of a stage."""
    if saved not in (0, present):
        raise ValueError(
            f"The compression state of a checkpoint does not fit the devices of a stage. Received: that of {saved} "
            f"devices in each stage. Expected: {present}, as in this strategy: with others, the sum of residuals would "
            "be another one. Use a layout map over as many devices, or restore the model alone, without "
            "`compression=strategy.compression_state`: then residuals begin at zero."
        )
