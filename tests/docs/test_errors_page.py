"""`docs/errors.md` has a row for every message of tfdist, and no other rows.

The test finds messages in the sources:

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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
TOPS = ("tfdist", "strategies", "callbacks")
SAYING = frozenset({"explained", "warn", "warning", "error", "exception", "say", "_say"})
INTERNAL = frozenset({"ValueError", "TypeError", "RuntimeError", "KeyError", "LookupError"})
NEVER = frozenset({"AssertionError", "NotImplementedError", "StopIteration", "SystemExit", "KeyboardInterrupt"})
# Messages that their callers catch: the strict validation of a checkpoint's manifest, the parser of numbers.
CAUGHT_AT_ONCE = frozenset({"… is not a numeric dtype"})
# The heading above the messages of TensorFlow and Keras.
STOCK = "## Messages of TensorFlow and Keras"


def first_sentence(text: str) -> str:
    """The text that identifies a message.

    It ends at the first full stop or "Received:" and has no characters that documents and terminals show differently.
    """
    text = re.sub(r"\s+", " ", text.replace("`", "")).strip()
    text = re.split(r"(?<=[.!?]) (?=[A-Z…'(])|:? ?\b(?:Received|Expected): ", text)[0]
    return re.sub(r"%s|%d|%\.0f", "…", text).replace("%%", "%").strip(" .")


def literal(node: ast.AST) -> str | None:
    """The text of a string, with … for inserted values; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else literal(part) or "" for part in node.values)
    return None


def is_exception(name: str) -> bool:
    return name not in NEVER and bool(re.search(r"(Error|Closed|Refused|Warning|Exception)$", name))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def messages(source: str) -> dict[str, int]:
    """The messages of a source: their first sentences with their lines."""
    return {
        sentence: line
        for line, sentence in reversed(list(sentences(ast.parse(source))))
        if any(character.isalpha() for character in sentence)
    }


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node)
            texts = [text for argument in node.args if (text := literal(argument))]
            if texts and (is_exception(name) or name in SAYING):
                text = texts[0]
                if name not in INTERNAL or not text[0].islower():
                    yield node.lineno, first_sentence(text)
        elif id(node) not in documentation | parts and (text := literal(node)):
            if re.search(r"\b(Received|Expected): \S", text):
                yield node.lineno, first_sentence(text)


def all_messages() -> dict[str, str]:
    """The file and line of each message of tfdist, by its first sentence."""
    found: dict[str, str] = {}
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            inside = file.relative_to(ROOT / top)
            if (ROOT / top / inside.parts[0]).is_symlink():
                continue  # the links to strategies/ and callbacks/, which are read themselves
            for sentence, line in messages(file.read_text(encoding="utf-8")).items():
                if sentence not in CAUGHT_AT_ONCE:
                    found.setdefault(sentence, f"{file.relative_to(ROOT)}:{line}")
    return found


def rows(page: str) -> list[str]:
    """The messages of the page: the first cells of its tables."""
    cells = re.findall(r"^\| (`+)(.+?)\1 \|", page, re.MULTILINE)
    return [first_sentence(cell) for _, cell in cells]


MESSAGES = all_messages()


def on_page(part: int) -> list[str]:
    own, _, stock = PAGE.read_text(encoding="utf-8").partition(STOCK)
    return rows((own, stock)[part])


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 200
    assert "The training data of a model is known only while fit runs" in MESSAGES
    assert "not in rounds" not in MESSAGES


@pytest.mark.parametrize("sentence", sorted(MESSAGES), ids=lambda sentence: sentence[:80])
def test_message_is_on_the_page(sentence: str) -> None:
    assert sentence in on_page(0), (
        f"docs/errors.md has no row for the message at {MESSAGES[sentence]}. Add one to the table of its area:\n"
        f"| `{sentence}` | the cause and the remedy |"
    )


def test_every_row_has_a_message() -> None:
    gone = [row for row in on_page(0) if row not in MESSAGES]
    assert not gone, f"docs/errors.md has rows of messages that tfdist does not have: {gone}"


def test_no_message_has_two_rows() -> None:
    listed = on_page(0)
    assert sorted(listed) == sorted(set(listed))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise ValueError('It is wrong. Received: 1.')", ["It is wrong"]),
        ("raise ValueError(f'`{x}` is wrong. Received: {x}')", ["… is wrong"]),
        ("def f():\n    return UsageError('It is wrong.')", ["It is wrong"]),
        ("raise tf.errors.UnavailableError(None, None, f'A server {x} is lost. Go.')", ["A server … is lost"]),
        ("raise LinkClosed('it does not answer')", ["it does not answer"]),
        ("raise RuntimeError('not in rounds')", []),
        ("raise AssertionError('Unreachable.')", []),
        ("_log.warning('It is late: %s', x)", ["It is late: …"]),
        ("console.say(f'{x} is frozen: {y}')", ["… is frozen: …"]),
        ("def f(x):\n    return f'{x} is late. Expected: {x}'", ["… is late"]),
        ("def f():\n    '''Says. Received: this.'''", []),
        ("raise OSError(1, f'{x}: {y}')", []),
    ],
)
def test_definition_of_a_message(source: str, found: list[str]) -> None:
    assert list(messages(source)) == found
