"""Compares the CPUs of the workers on which columns decode the same gradients."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.tensorflow_internals.xla_functions import cpu_instructions_of, leave_xla_to_users


def compare_cpus_of_columns(columns: Sequence[Sequence[str]]) -> None:
    """Leaves XLA to the users if columns have CPUs with different instructions, and their weights would differ.

    XLA decodes and sums large compressed gradients in each column.

    Args:
        columns: By column, the devices of its stages.
    """
    tasks: dict[tuple[str | None, int | None], str] = {}
    for device in (device for column in columns for device in column):
        spec = tf.DeviceSpec.from_string(device)
        tasks.setdefault((spec.job, spec.task), spec.replace(device_type="CPU", device_index=0).to_string())
    if len(columns) == 1 or len(tasks) == 1:
        return
    numbers = {task: cpu_instructions_of(host) for task, host in tasks.items()}
    first = next(iter(numbers.values()))
    if others := [task or 0 for (_, task), number in numbers.items() if number != first]:
        leave_xla_to_users(others)
