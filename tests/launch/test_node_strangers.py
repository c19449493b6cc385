"""Who knows no token cannot end a run that goes on over several hosts."""

import contextlib
import json
import socket

from tfdist.launch.nodes.frames import framed
from tfdist.launch.nodes.handshake import Greeting, is_proof

LIMIT_SECONDS = 20
HALF_A_CHARACTER = "\ud800"  # JSON can say it, UTF-8 cannot


def test_a_proof_that_is_no_text_is_none():
    assert not is_proof(json.dumps({"proof": HALF_A_CHARACTER}).encode(), b"secret")


def test_a_stranger_cannot_end_the_run(node):
    runs = [node(rank, "note(f'up-{RANK}'); wait_for('go')") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    with socket.create_connection(("127.0.0.1", node.port)) as stranger:
        stranger.settimeout(LIMIT_SECONDS)
        stranger.sendall(framed(Greeting.new().encode()) + framed(json.dumps({"proof": HALF_A_CHARACTER}).encode()))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    (runs[0]._here / "go").touch()
    assert [run.end().code for run in runs] == [0, 0]
