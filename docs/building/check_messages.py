"""`docs/errors.md` has a row for every message of tfdist, and no other rows.

- A message is the text of an exception that is created (raised, or returned to be raised), of a warning, of a line of
  the log or of `tfdist run` (`say`), and every text with "Received:" or "Expected:".
- Not messages are errors that no user can cause: `AssertionError`, and built-in errors whose text begins with a small
  letter, as in `RuntimeError("not in rounds")`. Errors of tfdist's classes and `TimeoutError` always count, because
  they are shown as part of another message ("refused a connection from host: the message is not a hello").

A message is identified by its first sentence, with … for inserted values.
"""

import ast
import re
from collections.abc import Iterator

from page_files import Finding, Pages, line_at

PAGE = "docs/errors.md"
_SAYING = frozenset({"explained", "warn", "warning", "error", "exception", "say", "_say"})
_INTERNAL = frozenset({"ValueError", "TypeError", "RuntimeError", "KeyError", "LookupError"})
_NEVER = frozenset({"AssertionError", "NotImplementedError", "StopIteration", "SystemExit", "KeyboardInterrupt"})
# Messages that their callers catch: the strict validation of a checkpoint's manifest, the parser of numbers.
_CAUGHT_AT_ONCE = frozenset({"… is not a numeric dtype"})
# The heading above the messages of TensorFlow and Keras.
_STOCK = "## Messages of TensorFlow and Keras"
_ROW = re.compile(r"^\| (`+)(.+?)\1 \|", re.MULTILINE)


def rows_of_messages(pages: Pages) -> Iterator[Finding]:
    """Messages without a row, and rows without a message or of one that has a row."""
    own, _, _ = pages.markdown.get(PAGE, "").partition(_STOCK)
    found = all_messages(pages)
    rows: set[str] = set()
    for match in _ROW.finditer(own):
        sentence, line = first_sentence(match[2]), line_at(own, match.start())
        if sentence in rows:
            yield Finding(PAGE, line, f"second row of {sentence!r}")
        elif sentence not in found:
            yield Finding(PAGE, line, f"no message of tfdist is {sentence!r}")
        rows.add(sentence)
    for sentence, (path, line) in found.items():
        if sentence not in rows:
            yield Finding(path, line, f"no row in {PAGE}. Expected: | `{sentence}` | the cause and the remedy |")


def all_messages(pages: Pages) -> dict[str, tuple[str, int]]:
    """The file and line of each message of tfdist, by its first sentence."""
    found: dict[str, tuple[str, int]] = {}
    for path, source in pages.sources.items():
        for sentence, line in messages(source).items():
            if sentence not in _CAUGHT_AT_ONCE:
                found.setdefault(sentence, (path, line))
    return found


def first_sentence(text: str) -> str:
    """The text that identifies a message.

    It ends at the first full stop or "Received:" and has no characters that documents and terminals show differently.
    """
    text = re.sub(r"\s+", " ", text.replace("`", "")).strip()
    text = re.split(r"(?<=[.!?]) (?=[A-Z…'(])|:? ?\b(?:Received|Expected): ", text)[0]
    return re.sub(r"%s|%d|%\.0f", "…", text).replace("%%", "%").strip(" .")


def _literal(node: ast.AST) -> str | None:
    """The text of a string, with … for inserted values; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else _literal(part) or "" for part in node.values)
    return None


def _is_exception(name: str) -> bool:
    return name not in _NEVER and bool(re.search(r"(Error|Closed|Refused|Warning|Exception)$", name))


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def messages(source: str) -> dict[str, int]:
    """The messages of a source: their first sentences with their lines."""
    return {
        sentence: line
        for line, sentence in reversed(list(_sentences(ast.parse(source))))
        if any(character.isalpha() for character in sentence)
    }


def _sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name_of(node)
            texts = [text for argument in node.args if (text := _literal(argument))]
            if texts and (_is_exception(name) or name in _SAYING):
                text = texts[0]
                if name not in _INTERNAL or not text[0].islower():
                    yield node.lineno, first_sentence(text)
        elif id(node) not in documentation | parts and (text := _literal(node)):
            if re.search(r"\b(Received|Expected): \S", text):
                yield node.lineno, first_sentence(text)
