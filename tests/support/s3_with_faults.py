"""An S3 server of moto behind a proxy that injects faults. Prints the proxy's address; ends when its input ends."""

import asyncio
import collections
import contextlib
import random
import sys
import threading

import aiohttp
from aiohttp import web
from moto.server import ThreadedMotoServer

ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>{}</Message></Error>'
REFUSED = {
    "unavailable": (503, "ServiceUnavailable", "Please try again."),
    "slow down": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}
_CHANGES = ("PUT", "DELETE")
# How the last request of a client that is killed ends.
_KILLS = ("reset", "cut off", "lost reply", "late", "after the next owner")
_OWN_HEADERS = ("transfer-encoding", "connection", "content-length", "content-encoding", "date", "server")


class Proxy:
    """Forwards requests; those of a client, named by its access key, fail at `rates`, or after `requests_left`.

    | fault | what is executed | what the client sees |
    |---|---|---|
    | unavailable, slow down, expired | nothing; credentials stay expired for up to 0.4 s | an error of S3 |
    | reset | nothing | a connection that breaks |
    | cut off | nothing, as the server gets half of the content of an upload | the same |
    | lost reply | the request | the same |
    | late | the request, up to 0.5 s later | the same |
    | after the next owner | a change, when another client has created an epoch of the run | the same |
    | late reply | the request | nothing within `limit_seconds`, its own time-out |
    | late request | the request, after `limit_seconds` | the same |
    | old list | | a list as it was some time ago |
    """

    def __init__(self, target):
        self.target, self.session = target, None
        self.rates, self.random, self.hits = {}, random.Random(0), collections.Counter()
        self.limit_seconds, self.expired_until = 60.0, 0.0
        self.next, self.requests_left = {}, {}
        self.old_lists = {}
        self.late, self.held = set(), []

    async def control(self, request):
        """Takes orders; returns what was injected, and which clients are killed.

        `rates` of faults with the `seed` and the `limit_seconds` of clients; the faults of the `next` requests of
        clients; `requests_left` until a client is killed, None for never; `deliver`: sends all that is late first.
        """
        orders = await request.json()
        if "rates" in orders:
            self.rates, self.random = orders["rates"], random.Random(orders["seed"])
            self.limit_seconds, self.expired_until = orders.get("limit_seconds", 60.0), 0.0
        self.next |= orders.get("next", {})
        for client, left in orders.get("requests_left", {}).items():
            self.requests_left[client] = float("inf") if left is None else left
        if orders.get("deliver"):
            self.deliver(self.held)
            self.held = []
            await asyncio.gather(*self.late)
        killed = [client for client, left in self.requests_left.items() if left < 0]
        return web.json_response({"hits": self.hits, "killed": killed})

    async def handle(self, request):
        body = await request.read()
        client = _client(request)
        left = self.requests_left[client] = self.requests_left.get(client, float("inf")) - 1
        if left < -1:
            return self.reset(request)
        is_last = left == -1
        fault = self.random.choice(_KILLS) if is_last else self.draw(client)
        if (fault == "cut off" and not body) or (fault == "after the next owner" and request.method not in _CHANGES):
            fault = "reset"
        if fault is not None:
            self.hits[f"killed: {fault}" if is_last else fault] += 1
        if fault in REFUSED:
            status, code, text = REFUSED[fault]
            return web.Response(status=status, text=ERROR.format(code, text), content_type="application/xml")
        if fault == "cut off":
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await self.forward(request, _half(body))
        elif fault == "lost reply":
            await self.forward(request, body)
        elif fault == "late":
            self.deliver([(request, body)])
        elif fault == "after the next owner":
            self.held.append((request, body))
        if fault in _KILLS:
            return self.reset(request)
        pause = self.limit_seconds + self.random.uniform(0.05, 0.5)
        if fault == "late request":
            await asyncio.sleep(pause)
        status, content, headers, size = await self.forward(request, body)
        if fault == "late reply":
            await asyncio.sleep(pause)
        if "list-type" in request.query:
            old = self.old_lists.get(request.raw_path)
            if old is not None and self.random.random() < self.rates.get("old list", 0):
                self.hits["old list"] += 1
                status, content, headers = old
            elif old is None or self.random.random() < 0.3:
                self.old_lists[request.raw_path] = status, content, headers
        if request.method == "HEAD":
            return web.Response(status=status, headers={**headers, "Content-Length": size})
        return web.Response(status=status, body=content, headers=headers)

    def draw(self, client):
        if self.next.get(client):
            return self.next[client].pop(0)
        now = asyncio.get_running_loop().time()
        if now < self.expired_until:
            return "expired"
        chance = self.random.random()
        for fault, rate in self.rates.items():
            if fault != "old list" and (chance := chance - rate) < 0:
                if fault == "expired":
                    self.expired_until = now + self.random.uniform(0, 0.4)
                return fault
        return None

    @staticmethod
    def reset(request):
        request.transport.abort()
        return web.Response()

    def deliver(self, requests):
        """Sends requests to the server later, whose clients do not wait for them."""
        for request, body in requests:
            task = asyncio.ensure_future(self.forward_later(request, body))
            self.late.add(task)
            task.add_done_callback(self.late.discard)

    def deliver_those_before(self, creation):
        """Sends the requests of other clients that waited for this next owner of the run."""
        run, owner = _run(creation), _client(creation)
        earlier = [held for held in self.held if _run(held[0]) == run and _client(held[0]) != owner]
        self.held = [held for held in self.held if held not in earlier]
        self.deliver(earlier)

    async def forward_later(self, request, body):
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        await self.forward(request, body)

    async def forward(self, request, body):
        headers = {name: value for name, value in request.headers.items() if name.lower() != "transfer-encoding"}
        skipped = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
        url = self.target + request.raw_path
        async with self.session.request(
            request.method, url, data=body or None, headers=headers, skip_auto_headers=skipped
        ) as reply:
            content = await reply.read()
            if reply.status == 200 and request.method == "PUT" and "/epochs/" in request.raw_path:
                self.deliver_those_before(request)
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in _OWN_HEADERS}
            return reply.status, content, kept, reply.headers.get("Content-Length", "0")


async def _half(body):
    yield body[: len(body) // 2]
    raise ConnectionResetError


def _client(request):
    return request.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]


def _run(request):
    return request.raw_path.split("/")[2]


async def main():
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    proxy = Proxy(f"http://{host}:{port}")
    proxy.session = aiohttp.ClientSession(auto_decompress=False)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/__faults__", proxy.control)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end():
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await ended.wait()
    await proxy.session.close()
    await runner.cleanup()
    moto.stop()


if __name__ == "__main__":
    asyncio.run(main())
