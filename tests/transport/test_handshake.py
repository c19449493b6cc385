"""The handshake, without sockets."""

import dataclasses
import json

import pytest

from tfdist.transport.handshake import ClientHandshake, Credentials, Hello, ServerHandshake, is_proof
from tfdist.transport.transport_errors import (
    ClusterMismatchError,
    FrameError,
    HandshakeError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
)

OURS = Credentials("tfdist test", 1, "0123456789abcdef", "our cluster")


def run(client: Credentials, server: Credentials):
    """Runs a handshake; returns the keys of both sides, or raises what the client raises."""
    ours, theirs = ClientHandshake(client), ServerHandshake(server)

    def answer(body):
        try:
            return theirs.receive(body)
        except HandshakeError as error:
            if not error.reply:
                raise
            return error.reply

    keys = ours.finish(answer(ours.prove(answer(ours.hello))))
    return keys, theirs.keys


@pytest.mark.parametrize(
    "credentials", [OURS, dataclasses.replace(OURS, token=""), dataclasses.replace(OURS, cluster="")]
)
def test_both_sides_derive_the_same_keys(credentials):
    client, server = run(credentials, credentials)
    assert (client.send_key, client.receive_key) == (server.receive_key, server.send_key)
    assert client.send_key != client.receive_key
    assert run(credentials, credentials)[0] != client, "the nonces differ"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"token": "0123456789abcdeX"}, TokenRejectedError),
        ({"token": ""}, TokenRejectedError),
        ({"cluster": "another"}, ClusterMismatchError),
        ({"cluster": "another", "token": "x"}, ClusterMismatchError),
        ({"protocol": 2}, ProtocolMismatchError),
        ({"service": "tfdist other"}, HandshakeError),
    ],
)
def test_client_learns_why_it_is_refused(changed, error):
    with pytest.raises(error) as raised:
        run(OURS, dataclasses.replace(OURS, **changed))
    assert type(raised.value) is error


@pytest.mark.parametrize("same_version", [False, True])
def test_versions_count_where_they_must_be_the_same(monkeypatch, same_version):
    ours = dataclasses.replace(OURS, same_version=same_version)
    client = ClientHandshake(ours)
    hello = dataclasses.replace(Hello.of(ours, is_client=False), version="9.9.9").encode()
    if not same_version:
        assert client.prove(hello)
        return
    with pytest.raises(ProtocolMismatchError, match="the other side is tfdist 9.9.9"):
        client.prove(hello)


def test_nothing_secret_is_sent_before_a_proof():
    """Neither the token nor the description of the cluster; the server's hello has no digest of it at all."""
    client, server = ClientHandshake(OURS), ServerHandshake(OURS)
    hello = server.receive(client.hello)
    sent = client.hello + hello + client.prove(hello)
    assert b"0123456789abcdef" not in sent and b"our cluster" not in sent
    assert Hello.decode(hello).cluster == ""
    assert Hello.decode(client.hello).cluster != Hello.decode(ClientHandshake(OURS).hello).cluster


def test_proofs_and_keys_all_differ_and_depend_on_everything(monkeypatch):
    """Otherwise a proof that was read on the network could be replayed, or would reveal a key."""
    secrets = []
    for token in ("0123456789abcdef", "another token...."):
        for nonces in (("1" * 64, "2" * 64), ("2" * 64, "1" * 64), ("1" * 64, "1" * 64)):
            monkeypatch.setattr("secrets.token_hex", lambda count, left=list(nonces): left.pop(0))
            credentials = dataclasses.replace(OURS, token=token)
            client, server = ClientHandshake(credentials), ServerHandshake(credentials)
            proof = client.prove(server.receive(client.hello))
            answer = server.receive(proof)
            keys = client.finish(answer)
            secrets += [*(bytes.fromhex(json.loads(body)["proof"]) for body in (proof, answer))]
            secrets += [keys.send_key, keys.receive_key]
    assert len(set(secrets)) == len(secrets) == 24


def test_reflected_messages_prove_nothing():
    client = ClientHandshake(OURS)
    with pytest.raises(InvalidProofError):
        client.finish(client.prove(client.hello))
    server = ServerHandshake(OURS)
    hello = server.receive(ClientHandshake(OURS).hello)
    with pytest.raises(FrameError):
        server.receive(hello)


def test_server_without_the_token():
    client, server = ClientHandshake(OURS), ServerHandshake(dataclasses.replace(OURS, token="another token...."))
    client.prove(server.receive(client.hello))
    with pytest.raises(InvalidProofError):
        client.finish(json.dumps({"proof": "00" * 32}).encode())


def test_proof_that_is_not_text():
    """JSON can encode half a character, UTF-8 cannot."""
    assert not is_proof(json.dumps({"proof": "\ud800"}).encode(), b"secret")


def test_credentials_need_a_secret():
    with pytest.raises(ValueError, match="without a secret"):
        Credentials("tfdist test", 1, "")
