"""A coordinator and its nodes, without sockets and clocks."""

from tfdist.launch.rendezvous.coordinator import RunCoordinator
from tfdist.launch.run_spec import RunSpec
from tfdist.transport.transport_errors import ConnectionClosedError


class FakeConnection:
    """Records sent messages."""

    def __init__(self, local_address="127.0.0.1") -> None:
        self.sent, self.local_address = [], local_address
        self.is_broken = False

    def send(self, message):
        if self.is_broken:
            raise ConnectionClosedError("the other side does not read its messages")
        self.sent.append(message)

    def close(self):
        self.sent.append({"type": "closed"})

    def take(self, kind):
        """The messages of a type since the last call."""
        found = [message for message in self.sent if message["type"] == kind]
        self.sent = [message for message in self.sent if message["type"] != kind]
        return found


class Hosts:
    """A coordinator and its nodes. Heartbeat timeout 8 s, patience 5 s, grace to save 25 s."""

    def __init__(
        self,
        *,
        nodes=2,
        max_restarts=3,
        min_workers=None,
        delay=0.0,
        start_timeout=60.0,
        silence=8.0,
        chief=False,
        servers=0,
        elastic=None,
        run_id="f00d",
    ) -> None:
        self.spec = RunSpec(
            nodes=nodes,
            max_restarts=max_restarts,
            min_workers=min_workers,
            restart_delay=delay,
            start_timeout=start_timeout,
            heartbeat_timeout=silence,
            chief=chief,
            parameter_servers=servers,
            elastic=elastic,
            run_id=run_id,
            run_seed=7,
        )
        self.now = 0.0
        self.coordinator = RunCoordinator(self.spec, now=0.0)
        self.connections, self.nodes = {}, {}

    def join(self, rank, *, workers=1, address="127.0.0.1", seen_as="127.0.0.1", **changed):
        connection = FakeConnection(seen_as)
        message = {
            "node": rank,
            "host": f"h{rank}",
            "workers": workers,
            "address": address,
            "options": self.spec.common_options,
            **changed,
        }
        node = self.coordinator.join(connection, message, now=self.now)
        if node is not None:
            self.connections[rank], self.nodes[rank] = connection, node
        self.look()
        return connection

    def look(self, seconds=0.0, *, silent=()):
        """Lets time pass, during which all nodes but some send heartbeats."""
        end = self.now + seconds
        while True:
            for rank, node in self.nodes.items():
                if rank not in silent:
                    node.heard_at = self.now
            self.coordinator.tick(now=self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.5, end)

    def tell(self, rank, kind, **message):
        self.coordinator.handle(self.nodes[rank], {"type": kind, **message}, now=self.now)
        self.look()

    def get_ready(self):
        self.look()
        for rank, connection in self.connections.items():
            for prepare in connection.take("prepare"):
                ports = [1000 * (rank + 1) + index for index in range(prepare["processes"])]
                self.tell(rank, "ready", round=prepare["round"], ports=ports)

    def start(self, **workers):
        for rank in range(self.spec.nodes):
            self.join(rank, workers=workers.get(f"w{rank}", 1))
        self.get_ready()
        return self

    def lose(self, rank):
        """Ends the connection of a node."""
        del self.connections[rank]
        self.coordinator.lose(self.nodes.pop(rank), "gone", now=self.now)
        self.look()

    def cut_off(self, rank):
        """Makes a node silent until it is lost."""
        self.look(self.spec.heartbeat_timeout, silent=[rank])
        del self.connections[rank], self.nodes[rank]

    def done(self, rank, *codes, attempt=0, signalled=False, lines=(), failures=None, **changed):
        ends = [
            {
                "rank": own_rank,
                "task": "",
                "returncode": code,
                "last_lines": list(lines),
                "was_signalled": signalled,
                "failure_reason": "",
                "at": 0.0,
                **(failures or {}),
            }
            for own_rank, code in zip(self.nodes[rank].roles, codes, strict=False)
        ]
        nothing = {
            "stall": "",
            "start_failure": None,
            "left_out": [],
            "heartbeat_ranks": [],
            "errors": [],
            "fit": 1,
            "step": attempt,
            "saved": None,
        }
        outcome = {
            "workers": len(codes),
            "exits": ends,
            **nothing,
            "heartbeat_ranks": [end["rank"] for end in ends],
            **changed,
        }
        self.tell(rank, "done", attempt=attempt, outcome=outcome)

    def orders(self, rank):
        return [(order["reason"], order["signal"], order["kill"]) for order in self.connections[rank].take("shut_down")]

    def over(self, rank=0):
        (over,) = self.connections[rank].take("run_over")
        return over["code"]


def failed_on(hosts, rank, attempt, **workers):
    """An attempt that a worker of a host has ended, on all hosts."""
    hosts.tell(rank, "failed", attempt=attempt, text="killed")
    for other in hosts.nodes:
        share = hosts.nodes[other].share
        if share:
            signalled = other != rank
            hosts.done(other, *([-15 if signalled else -9] * share), attempt=attempt, signalled=signalled)
    hosts.look()
