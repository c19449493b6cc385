"""Helpers of the tests of runs over two hosts."""

import socket

HOST = socket.gethostname()


NO_DELAY = ("--restart-delay", "0")


def says(ended, text):
    return any(text in line for line in ended.said)
