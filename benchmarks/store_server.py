"""An S3 server on this machine for measurements: moto's, a separate process, which runs where a core is idle.

Real servers are other machines, so what this one computes (0.3 s of a core for 50 MB) should not slow a training down.
Under Linux's SCHED_IDLE it gets three thousandths of a core that a training uses, too: uploads take longer then.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"


class StoreServer:
    """A running server, whose credentials are in the environment of this process and its children.

    Attributes:
        url: The address of its bucket.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process, self.url = process, f"s3://{BUCKET}"

    @property
    def cpu_seconds(self) -> float:
        """For how long it has computed so far."""
        status = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(status[11]) + int(status[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def store_server() -> Iterator[StoreServer]:
    """Yields a server with an empty bucket."""
    import s3fs

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, __file__], **pipes, text=True) as process:  # type: ignore[call-overload]
        os.environ |= {
            "AWS_ENDPOINT_URL": process.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        s3fs.S3FileSystem().mkdir(BUCKET)
        try:
            yield StoreServer(process)
        finally:
            process.stdin.close()
            process.wait(60)


def _serve() -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the parent closes it, or ends


if __name__ == "__main__":
    _serve()
