"""Two workers under a monitor of heartbeats, and a simulated clock."""

import json

from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.run_spec import run_roles

BOTH = {0: False, 1: False}


class Watch:
    """A monitor of two workers, checked every quarter of a second of a simulated clock."""

    def __init__(self, heartbeat_timeout=10.0, stall_timeout=60.0, roles=None):
        self.now = 1000.0
        self.monitor = HeartbeatMonitor(
            roles or run_roles(2),
            now=self.now,
            heartbeat_timeout_seconds=heartbeat_timeout,
            stall_timeout_seconds=stall_timeout,
        )
        self.messages = []

    def receive(self, rank, **said):
        self.monitor.receive(rank, json.dumps(said).encode(), now=self.now)

    def check(self, is_stopped=BOTH):
        report = self.monitor.check(is_stopped, now=self.now)
        self.messages += report.messages
        return report

    def pass_time(self, seconds, beating=(), is_stopped=BOTH, **said):
        """Looks on; returns the first report that ends something, or the last."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for rank in beating:
                self.receive(rank, alive=True, **said)
            report = self.check(is_stopped)
            if report.frozen or report.stall:
                break
        return report
