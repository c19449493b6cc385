"""Starts `s3_with_faults.py`, and connects to it as a client of its own name."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from tfdist.checkpoint.remote.remote_objects import Objects, connect_store
from tfdist.utils.remote_requests import Connection

BUCKET = "bucket"


class S3Server:
    """The proxy's `address`."""

    def __init__(self, address):
        self.address = address

    @property
    def environment(self):
        """The variables of processes that use it without an account."""
        credentials = {"AWS_ACCESS_KEY_ID": "worker", "AWS_SECRET_ACCESS_KEY": "secret"}
        return {"AWS_ENDPOINT_URL": self.address, "AWS_DEFAULT_REGION": "us-west-2", **credentials}

    def control(self, **orders):
        """See `Proxy.control`."""
        content, headers = json.dumps(orders).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/__faults__", content, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def objects(self, client, run, **options):
        """Requests of a client, connected as `FailureRecovery` would with these settings of fsspec."""
        import fsspec

        settings = {
            "key": client,
            "secret": "secret",
            "endpoint_url": self.address,
            "client_kwargs": {"region_name": "us-west-2"},
        }
        url = f"s3://{BUCKET}/{run}"
        connection, path = connect_store(url)

        def new():
            fsspec.config.conf["s3"] = settings
            try:
                return connection.file_system
            finally:
                del fsspec.config.conf["s3"]

        return Objects(Connection(new), path, **options)


@contextlib.contextmanager
def s3_server():
    """Yields a server with a bucket, of a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("s3_with_faults.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True) as process:
        server = S3Server(process.stdout.readline().strip())
        server.objects("owner", "run").connection.file_system.mkdir(BUCKET)
        try:
            yield server
        finally:
            process.stdin.close()
            process.wait(60)
