"""A coordinator, and what hosts tell it, without sockets and clocks."""

from tfdist.launch.limits import Limits
from tfdist.launch.nodes.coordinator import Coordinator
from tfdist.launch.nodes.link import LinkClosed
from tfdist.launch.nodes.rules import Rules


class FakeLink:
    """Keeps what it is sent."""

    def __init__(self, local_address="127.0.0.1") -> None:
        self.sent, self.local_address = [], local_address
        self.is_broken = False

    def send(self, message):
        if self.is_broken:
            raise LinkClosed("it does not read what it is sent")
        self.sent.append(message)

    def close(self):
        self.sent.append({"type": "closed"})

    def take(self, kind):
        """The messages of a kind since the last call."""
        found = [message for message in self.sent if message["type"] == kind]
        self.sent = [message for message in self.sent if message["type"] != kind]
        return found


class Hosts:
    """A coordinator and what hosts tell it. Silence limit 8 s, patience 5 s, grace to save 25 s."""

    def __init__(
        self, *, nodes=2, max_restarts=3, min_workers=None, delay=0.0, start_timeout=60.0, silence=8.0
    ) -> None:
        self.rules = Rules("f00d", nodes, max_restarts, min_workers, delay, start_timeout, Limits(None, silence, 0.0))
        self.now = 0.0
        self.coordinator = Coordinator(self.rules, now=0.0)
        self.links, self.members = {}, {}

    def join(self, rank, *, workers=1, address="127.0.0.1", seen_as="127.0.0.1", **changed):
        link = FakeLink(seen_as)
        same = {"--nodes": self.rules.nodes, "--max-restarts": self.rules.max_restarts}
        options = {**same, "--min-workers": self.rules.min_workers}
        said = {"node": rank, "host": f"h{rank}", "workers": workers, "address": address, "options": options, **changed}
        member = self.coordinator.join(link, said, now=self.now)
        if member is not None:
            self.links[rank], self.members[rank] = link, member
        self.look()
        return link

    def look(self, seconds=0.0, *, silent=()):
        """Lets time pass, in which all but some give signs of life."""
        end = self.now + seconds
        while True:
            for rank, member in self.members.items():
                if rank not in silent:
                    member.heard_at = self.now
            self.coordinator.look(now=self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.5, end)

    def tell(self, rank, kind, **said):
        self.coordinator.hear(self.members[rank], {"type": kind, **said}, now=self.now)
        self.look()

    def get_ready(self):
        self.look()
        for rank, link in self.links.items():
            for prepare in link.take("prepare"):
                ports = [1000 * (rank + 1) + index for index in range(prepare["workers"])]
                self.tell(rank, "ready", round=prepare["round"], ports=ports)

    def start(self, **workers):
        for rank in range(self.rules.nodes):
            self.join(rank, workers=workers.get(f"w{rank}", 1))
        self.get_ready()
        return self

    def done(self, rank, *codes, attempt=0, told=False, lines=(), **changed):
        first = self.members[rank].first_rank
        ends = [
            {
                "rank": first + index,
                "returncode": code,
                "last_lines": list(lines),
                "was_told": told,
                "verdict": "",
                "at": 0.0,
            }
            for index, code in enumerate(codes)
        ]
        nothing = {"stall": "", "unstarted": None, "heard": [], "errors": [], "fit": 1, "step": attempt, "saved": None}
        outcome = {"workers": len(codes), "ends": ends, **nothing, "heard": [end["rank"] for end in ends], **changed}
        self.tell(rank, "done", attempt=attempt, outcome=outcome)

    def orders(self, rank):
        return [(order["reason"], order["signal"], order["kill"]) for order in self.links[rank].take("end")]

    def over(self, rank=0):
        (over,) = self.links[rank].take("over")
        return over["code"]


def failed_on(hosts, rank, attempt, **workers):
    """An attempt that a worker of a host has ended, on all hosts."""
    hosts.tell(rank, "failed", attempt=attempt, text="killed")
    for other in hosts.members:
        share = hosts.members[other].share
        if share:
            told = other != rank
            hosts.done(other, *([-15 if told else -9] * share), attempt=attempt, told=told)
    hosts.look()
