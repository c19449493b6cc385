import socket

import pytest

from tfdist.launch.ports import ReservedPorts


def test_ports_are_held_until_released():
    with ReservedPorts(3) as reserved:
        assert len(set(reserved.ports)) == 3
        for port in reserved.ports:
            with socket.socket() as other, pytest.raises(OSError):
                other.bind(("127.0.0.1", port))
    for port in reserved.ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_a_failed_reservation_releases_what_it_had(monkeypatch):
    made = []

    class Broken(socket.socket):
        def bind(self, address):
            made.append(self)
            if len(made) == 2:
                raise OSError("no more")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Broken)
    with pytest.raises(OSError, match="no more"):
        ReservedPorts(3)
    assert [holder.fileno() for holder in made] == [-1, -1]
