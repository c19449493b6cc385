"""Names of variables that are unique within a strategy, under which compressors keep their state."""

import itertools
import weakref
from typing import Any

_paths: "weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]]" = weakref.WeakKeyDictionary()


def unique_path(strategy: Any, variable: Any) -> str:
    """Returns the variable's path, with a number if another variable of the strategy has or had the same path."""
    paths = _paths.setdefault(strategy, {})
    base_path = str(getattr(variable, "path", None) or variable.name.partition(":")[0])  # a tf.Variable has a name only
    for number in itertools.count():
        path = f"{base_path}_{number}" if number else base_path
        if path not in paths:
            paths[path] = weakref.ref(variable)
        # The path of a deleted variable is not used again, as compressors may hold state under it.
        if paths[path]() is variable:
            return path
    raise AssertionError("unreachable")


def trained_variables(strategy: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the variables that an optimizer updates, by `unique_path`; an empty dict if it is not built."""
    return {unique_path(strategy, variable): variable for variable in getattr(optimizer, "_trainable_variables", ())}
