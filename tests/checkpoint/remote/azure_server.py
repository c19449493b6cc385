"""Starts azurite, which plays Azure's blob storage, and connects to it."""

import contextlib
import shutil
import socket
import subprocess
import time

import pytest
from optional_packages import require

from tfdist.checkpoint.remote.remote_objects import Objects, connect_store
from tfdist.utils.remote_requests import Connection

_CONTAINER = "container"
_LIMIT_SECONDS = 60.0
# Those of every azurite.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def azure_server():
    """Yields a function that returns the objects of a run, as `FailureRecovery` would see them."""
    require("adlfs")
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("needs azurite: npm install -g azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    # The API version that adlfs asks for may be newer than azurite's.
    options += ["--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen([command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            address = f"http://127.0.0.1:{port}/{_ACCOUNT}"
            secret = f"AccountName={_ACCOUNT};AccountKey={_KEY}"
            settings = {"connection_string": f"DefaultEndpointsProtocol=http;{secret};BlobEndpoint={address};"}
            objects = _connected(settings)
            objects("run").connection.file_system.mkdir(_CONTAINER)
            yield objects
        finally:
            process.terminate()


def _wait_for(port, process):
    limit = time.monotonic() + _LIMIT_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert process.poll() is None and time.monotonic() < limit, "azurite does not listen"
        time.sleep(0.1)


def _connected(settings):
    import fsspec

    def objects(run, **options):
        connection, path = connect_store(f"az://{_CONTAINER}/{run}")

        def new():
            fsspec.config.conf["az"] = settings
            try:
                return connection.file_system
            finally:
                del fsspec.config.conf["az"]

        return Objects(Connection(new), path, **options)

    return objects
