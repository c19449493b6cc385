"""Undoes what is replaced in TensorFlow and Keras."""

from collections.abc import Iterator
from contextlib import contextmanager

from tfdist import patches


@contextmanager
def without_patches() -> Iterator[None]:
    """Within this context nothing is replaced at first; what is replaced in it is undone at its end."""
    with patches._lock:
        before, done = list(patches._replacements), set(patches._installed)
        _undo()
    try:
        yield
    finally:
        with patches._lock:
            _undo()
            for replacement in before:
                setattr(replacement.owner, replacement.name, replacement.new)
            patches._replacements[:] = before
            patches._installed.update(done)


def _undo() -> None:
    for owner, name, stock, new, _ in reversed(patches._replacements):
        if vars(owner).get(name) is not new:
            continue  # somebody else has replaced it since, or restored what was there
        if stock is patches._ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, stock)
    patches._replacements.clear()
    patches._installed.clear()
