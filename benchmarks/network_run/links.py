"""Network namespaces for workers, joined by a bridge through links of adjustable rate."""

import os
import subprocess
from types import TracebackType

INTERFACE = "eth0"

# What a link may send at once after a pause. It must cover the delay of timers (milliseconds in a virtual machine whose
# cores sleep), or the rate is never reached. It must not be larger: tokens that accumulate during computation let short
# exchanges pass at memory speed.
_BURST_SECONDS = 2e-3
_MIN_BURST_BYTES = 6_200
_QUEUE_SECONDS = 0.05
_MIN_QUEUE_BYTES = 256 * 1024
# Segments as large as a burst would find all tokens or none; packets that arrive while they wait would be lost.
_SEGMENTS_PER_BURST = 4
_UNUSED_NETWORK = "198.51.100.0/24"  # for documentation (RFC 5737)
_MIN_SEGMENT_BYTES, _MAX_SEGMENT_BYTES = 3_100, 65_536


class Network:
    """A bridge and a namespace for each worker; a context manager that removes them.

    The names contain the process id, and all interfaces are inside the namespaces, so that runs do not interfere.
    """

    def __init__(self, workers: int) -> None:
        """Chooses the names; entering the context creates the namespaces.

        Args:
            workers: Number of workers.
        """
        prefix = f"tfdist-{os.getpid()}"
        self._hub = f"{prefix}-hub"
        self.namespaces = tuple(f"{prefix}-{rank}" for rank in range(workers))
        self.addresses = tuple(f"10.77.0.{rank + 1}" for rank in range(workers))

    def __enter__(self) -> "Network":
        """Creates namespaces, bridge and links.

        Raises:
            RuntimeError: The host does not permit this, or lacks the programs.
        """
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, rank: int) -> list[str]:
        """Returns the prefix of a command that runs in the namespace of worker `rank`."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def shape(self, bits_per_second: int | None) -> None:
        """Limits the rate of all links in both directions.

        Args:
            bits_per_second: Including all headers; `None` removes the limit.
        """
        for rank, namespace in enumerate(self.namespaces):
            self._ip(namespace, "link", "set", INTERFACE, "gso_max_size", str(segment_bytes(bits_per_second)))
            for where, device in ((namespace, INTERFACE), (self._hub, f"port{rank}")):
                # Fails if the link was not shaped before.
                subprocess.run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], capture_output=True)
                if bits_per_second:
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *token_bucket(bits_per_second))
            # A connection learns the size of segments from its route, and asks again when routes change. With segments
            # of another link the packets of several connections arrive out of order, and are sent again.
            for change in ("add", "del"):
                self._ip(namespace, "route", change, _UNUSED_NETWORK, "dev", INTERFACE)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        self._ip(self._hub, "link", "add", "bridge", "type", "bridge")
        self._ip(self._hub, "link", "set", "bridge", "up")
        for rank, namespace in enumerate(self.namespaces):
            port = f"port{rank}"
            _run("ip", "netns", "add", namespace)
            peer = ("type", "veth", "peer", "name", INTERFACE, "netns", namespace)
            self._ip(self._hub, "link", "add", port, *peer)
            self._ip(self._hub, "link", "set", port, "master", "bridge", "up")
            # Packets of IPv6 neighbour discovery would be counted with the steps.
            _run(*self.command(rank), "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
            # Every kernel permits Reno. BBR, the default of some, varies its rate: an all-reduce of 3.3 MB at
            # 100 Mbit/s takes 280 to 390 ms with it, 280 ms with Reno. But Reno starts slowly after the pause of each
            # step: with PyTorch, too, a step of the MLP at 1 Gbit/s then takes a third longer.
            for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
                _run(*self.command(rank), "sysctl", "-qw", f"net.ipv4.{setting}")
            self._ip(namespace, "addr", "add", f"{self.addresses[rank]}/24", "dev", INTERFACE)
            self._ip(namespace, "link", "set", INTERFACE, "up")
            self._ip(namespace, "link", "set", "lo", "up")

    def _ip(self, namespace: str, *arguments: str) -> None:
        _run("ip", "-n", namespace, *arguments)

    def _remove(self) -> None:
        # Devices are removed with their namespace. Fails for namespaces that were not created.
        for namespace in (*self.namespaces, self._hub):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def burst_bytes(bits_per_second: int) -> int:
    """Returns how many bytes a link of this rate may send at once.

    >>> [burst_bytes(10**exponent) for exponent in (9, 8, 7)]
    [250000, 25000, 6200]
    """
    return max(_MIN_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))


def segment_bytes(bits_per_second: int | None) -> int:
    """Returns the largest segment that a worker may pass to a link of this rate."""
    if bits_per_second is None:
        return _MAX_SEGMENT_BYTES
    fitting = burst_bytes(bits_per_second) // _SEGMENTS_PER_BURST
    return min(_MAX_SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, fitting))


def token_bucket(bits_per_second: int) -> list[str]:
    """Returns the arguments of `tc qdisc add` for a link of this rate.

    >>> " ".join(token_bucket(1_000_000_000))
    'tbf rate 1000000000bit burst 250000b limit 6500000b'
    """
    burst = burst_bytes(bits_per_second)
    queue = burst + max(int(bits_per_second / 8 * _QUEUE_SECONDS), _MIN_QUEUE_BYTES)
    return ["tbf", "rate", f"{bits_per_second}bit", "burst", f"{burst}b", "limit", f"{queue}b"]


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"A program for the links is missing. Received: no `{command[0]}`. Expected: `ip`, `tc` and `sysctl`. "
            "Install iproute2 and procps."
        ) from error
    if done.returncode:
        raise RuntimeError(
            "The links between the workers cannot be created. "
            f"Received: `{' '.join(command)}` says: {done.stderr.strip() or done.returncode}. "
            "Expected: a Linux host on which root may create network namespaces (CAP_SYS_ADMIN and CAP_NET_ADMIN) with "
            "the kernel's veth, bridge and tbf. Run it as root, not in an unprivileged container."
        )
