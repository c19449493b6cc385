"""A text that every machine has: the sources of Python's standard library, as numbers of word pieces."""

import functools
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

UNKNOWN = 0
HELD_OUT_EVERY = 10
# A line end with the next line's indentation, a part of an identifier (`snake`, `Camel`, `HTTP`), or a character.
_PIECE = re.compile(r"\n *|[A-Z]?[a-z]+|[A-Z]+|\S")


@dataclass(frozen=True)
class Text:
    """A tokenised text.

    Attributes:
        train: int32 `[tokens]`, the numbers of the pieces; `UNKNOWN` for a piece outside of the vocabulary.
        held_out: int32 `[tokens]`, from files that are not in `train`.
        vocabulary: The pieces by number: the most frequent ones of the training files, in descending order.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: tuple[str, ...]


@functools.lru_cache
def load(vocabulary_size: int = 8000, characters: int = 4_000_000) -> Text:
    """Reads the top-level modules of the standard library, by name, and numbers their pieces.

    A Python version always gives the same text. Every tenth file is held out.

    Args:
        vocabulary_size: Number of pieces, including `UNKNOWN`.
        characters: Length of the text over all files.

    Raises:
        RuntimeError: The source files have fewer characters.
    """
    train, held_out = _pieces(characters)
    frequent = Counter(train).most_common(vocabulary_size - 1)
    vocabulary = ("<unknown>", *(piece for piece, _ in frequent))
    number = {piece: place for place, piece in enumerate(vocabulary)}
    train_numbers, held_out_numbers = (
        np.array([number.get(piece, UNKNOWN) for piece in pieces], np.int32) for pieces in (train, held_out)
    )
    return Text(train_numbers, held_out_numbers, vocabulary)


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts windows out of a text, for predicting the next tokens.

    Args:
        tokens: Int `[tokens]`.
        starts: int `[windows]`, the first token of each; at most `len(tokens) - length - 1`.
        length: Tokens in a window.

    Returns:
        The inputs, and the labels, which are one token further; both `[windows, length]`.

    >>> inputs, labels = windows(np.arange(10), np.array([0, 4]), 3)
    >>> inputs.tolist(), labels.tolist()
    ([[0, 1, 2], [4, 5, 6]], [[1, 2, 3], [5, 6, 7]])
    """
    places = starts[:, np.newaxis] + np.arange(length + 1)
    return tokens[places[:, :-1]], tokens[places[:, 1:]]


def random_windows(tokens: np.ndarray, *, seed: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts `count` windows at random positions, which depend on the seed only."""
    starts = np.random.default_rng(seed).integers(len(tokens) - length, size=count)
    return windows(tokens, starts, length)


def _pieces(characters: int) -> tuple[list[str], list[str]]:
    """Returns the pieces of the training files and of the held-out files."""
    directory, left = Path(os.__file__).parent, characters
    parts: tuple[list[str], list[str]] = ([], [])
    for index, file in enumerate(sorted(directory.glob("*.py"))):
        text = file.read_text(encoding="utf-8")[:left]
        left -= len(text)
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(_PIECE.findall(text))
    if left:
        raise RuntimeError(
            f"The standard library's sources are too short. Received: {characters - left:,} characters in *.py files "
            f"of {directory}. Expected: at least {characters:,}. Use a Python that is installed with its sources, or "
            "fewer characters."
        )
    return parts
