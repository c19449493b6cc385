"""`python -m tfdist.strategies` prints what strategies replace in TensorFlow and Keras, by which patch, and why."""

import sys

from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.patches import table
from tfdist.strategies.replicated_hooks import HOOKS
from tfdist.strategies.replicated_strategy import ReplicatedStrategy
from tfdist.strategies.shared_paths import patch_files
from tfdist.tensorflow_internals.runtime import exclude_from_autograph
from tfdist.tensorflow_internals.shared_operations import patch_graphs


def main() -> None:
    """Installs all of it in this process, and prints it."""
    patch_keras(ReplicatedStrategy, HOOKS)
    for install in (exclude_from_autograph, patch_graphs, patch_files):
        install()
    sys.stdout.write(f"{table()}\n")


if __name__ == "__main__":
    main()
