"""Helpers of the tests of runs over two hosts."""

import socket

HOST = socket.gethostname()


NO_DELAY = ("--restart-delay", "0")


# The end of a killed process at the other end of a TCP connection: a reset if it left something unread.
_ENDS = ("the connection was closed", "Connection reset by peer", "Broken pipe")


def says(ended, text):
    return any(text in line for line in ended.said)


def says_lost(ended, text):
    """Whether `text` was said, with the end of a connection in place of {}."""
    return any(says(ended, text.format(end)) for end in _ENDS)
