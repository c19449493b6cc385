"""Reads what another process sends and what should be a JSON object."""

import json
from typing import Any


def json_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object that `data` holds.

    Raises:
        ValueError: If it holds none, whatever bytes they are.

    >>> json_object(b'{"alive": true}')
    {'alive': True}
    >>> json_object(b"[1]")
    Traceback (most recent call last):
        ...
    ValueError: no JSON object
    """
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("no JSON object") from error
    if not isinstance(said, dict):
        raise ValueError("no JSON object")
    return said
