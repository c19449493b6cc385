"""Writes the table of private symbols into `docs/architecture.md`, from the calls of `private` and
`private_attributes`.

Run `python docs/building/private_symbols.py` after such a call was added, changed or removed.
"""

from collections.abc import Iterable
from pathlib import Path

from tfdist.private_symbols import PrivateSymbol, used_symbols

PAGE = Path(__file__).resolve().parents[1] / "architecture.md"
HEADING = "| module | symbol | why |\n|---|---|---|\n"
SHORT = {"tensorflow.python.": "tf….", "tensorflow": "tf", "keras.src.": "keras…."}


def row(symbol: PrivateSymbol) -> str:
    """The table's row of a symbol.

    >>> row(PrivateSymbol("keras.src.losses.loss:reduce_values", why="divides"))
    '| `keras….losses.loss` | `reduce_values` | divides |'
    """
    module, _, name = symbol.path.partition(":")
    for prefix, short in SHORT.items():
        module = module.replace(prefix, short, 1) if module.startswith(prefix) else module
    return f"| `{module}` | `{name}` | {symbol.why} |"


def table(symbols: Iterable[PrivateSymbol]) -> str:
    """The rows of the symbols of TensorFlow and Keras, sorted."""
    rows = {row(symbol) for symbol in symbols if symbol.path.startswith(("tensorflow", "keras"))}
    return "".join(f"{line}\n" for line in sorted(rows))


def main() -> None:
    """Replaces the rows of the page."""
    import tfdist.callbacks
    import tfdist.strategies  # noqa: F401

    before, heading, rest = PAGE.read_text(encoding="utf-8").partition(HEADING)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(before + heading + table(used_symbols()) + (f"\n{after}" if after else ""), encoding="utf-8")


if __name__ == "__main__":
    main()
