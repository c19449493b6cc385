import pytest

from tfdist.launch.processes.output import LineSplitter, render


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("  indented\t.", "  indented\t."),
        ("windows\r", "windows"),
        ("1/2\r2/2", "2/2"),
        ("\r1/2\r2/2\r", "2/2"),
        ("bar\r        \r", ""),
        ("1/2" + "\b" * 3 + "\r2/2" + "\b" * 3, ""),  # Keras wipes its bar before the next
        ("1/2" + "\b" * 3 + "2/2", "2/2"),
        ("\b\bx", "x"),
        ("\x1b[1m1/2\x1b[0m", "\x1b[1m1/2\x1b[0m"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[2K\x1b[1Aup\x1b[?25l", "up"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x00\x07b\x7f", "ab"),
    ],
)
def test_render(raw, shown):
    assert render(raw) == shown


def lines():
    return LineSplitter(interval_seconds=2.0)


def test_pieces_become_lines():
    screen = lines()
    assert screen.feed("a", now=0) == []
    assert screen.is_pending
    assert screen.feed("b\n\nc", now=0) == ["ab", ""]
    assert screen.flush() == ["c"]
    assert screen.flush() == []
    assert not screen.is_pending


def test_unfinished_line_waits_until_it_is_quiet():
    screen = lines()
    screen.feed("load", now=0)
    screen.feed("ing", now=1)
    assert screen.unfinished(now=2.9) == []
    assert screen.unfinished(now=3) == ["loading"]
    assert screen.unfinished(now=9) == []
    assert screen.feed("\nnext\n", now=9) == ["next"]  # no empty line for the newline that was missing
    assert screen.feed("\n", now=9) == [""]


def test_rest_of_a_shown_line_is_a_line():
    screen = lines()
    screen.feed("loading", now=0)
    screen.unfinished(now=2)
    assert screen.feed(" done\n", now=3) == [" done"]


def test_progress_bar_is_shown_now_and_then_while_it_moves():
    screen = lines()
    shown = []
    for tenth in range(100):
        assert screen.feed(f"\r{tenth}/99", now=tenth / 10) == []
        shown += screen.unfinished(now=tenth / 10)
    assert shown == ["20/99", "40/99", "60/99", "80/99"]
    assert screen.feed("\n", now=10) == ["99/99"]


def test_finished_bar_is_not_shown_twice():
    screen = lines()
    screen.feed("1/2\r2/2", now=0)
    assert screen.unfinished(now=2) == ["2/2"]
    assert screen.unfinished(now=5) == []
    assert screen.feed("\n", now=5) == []
    assert screen.feed("next\n", now=5) == ["next"]


def test_bar_that_erases_itself_leaves_nothing():
    assert lines().feed("1/2\r2/2\r   \r\nnext\n", now=0) == ["next"]


def test_endless_line_is_cut():
    screen = lines()
    shown = [line for _ in range(10) for line in screen.feed("x" * 20_000, now=0)]
    assert "".join(shown + screen.flush()) == "x" * 200_000
    assert len(shown) > 1


def test_endless_bar_does_not_grow():
    screen = lines()
    for number in range(20_000):
        screen.feed(f"\r{number}", now=0)
    assert len(screen._raw) < 100_000
