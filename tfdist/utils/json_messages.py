"""Parses JSON messages from other processes. Standard library only: the launcher may not import NumPy's threads."""

import json
from typing import Any


def json_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object that `data` encodes; raises a ValueError for anything else.

    >>> json_object(b'{"alive": true}')
    {'alive': True}
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message
