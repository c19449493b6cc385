"""An S3 server of moto behind a proxy that injects faults. Prints the proxy's address; ends when its input ends."""

import asyncio
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
_OWN_HEADERS = ("transfer-encoding", "connection", "content-length", "content-encoding", "date", "server")


class Proxy:
    """Forwards requests; those of a client, named by its access key, fail at `rates`, or after `requests_left`."""

    def __init__(self, target):
        self.target, self.session = target, None
        self.rates, self.random, self.hits = {}, random.Random(0), {}
        self.requests_left = {}
        self.old_lists = {}
        self.late = set()

    async def control(self, request):
        """Sets rates of faults and the seed, or kills a client after some requests; returns what was injected."""
        orders = await request.json()
        if "rates" in orders:
            self.rates, self.random = orders["rates"], random.Random(orders["seed"])
        self.requests_left.update(orders.get("requests_left", {}))
        killed = [client for client, left in self.requests_left.items() if left < 0]
        return web.json_response({"hits": self.hits, "killed": killed})

    async def handle(self, request):
        body = await request.read()
        client = request.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        if client in self.requests_left:
            self.requests_left[client] -= 1
            if self.requests_left[client] < 0:
                return self.reset(request)
        fault = self.draw()
        if fault in REFUSED:
            status, code, text = REFUSED[fault]
            return web.Response(status=status, text=ERROR.format(code, text), content_type="application/xml")
        if fault == "reset":
            return self.reset(request)
        if fault == "lost reply":
            await self.forward(request, body)
            return self.reset(request)
        if fault == "late":
            task = asyncio.ensure_future(self.forward_later(request, body))
            self.late.add(task)
            task.add_done_callback(self.late.discard)
            return self.reset(request)
        status, content, headers, size = await self.forward(request, body)
        if "list-type" in request.query:
            old = self.old_lists.get(request.raw_path)
            if old is not None and self.random.random() < self.rates.get("old list", 0):
                self.hits["old list"] = self.hits.get("old list", 0) + 1
                status, content, headers = old
            elif old is None or self.random.random() < 0.3:
                self.old_lists[request.raw_path] = status, content, headers
        if request.method == "HEAD":
            return web.Response(status=status, headers={**headers, "Content-Length": size})
        return web.Response(status=status, body=content, headers=headers)

    def draw(self):
        chance = self.random.random()
        for fault, rate in self.rates.items():
            if fault != "old list" and (chance := chance - rate) < 0:
                self.hits[fault] = self.hits.get(fault, 0) + 1
                return fault
        return None

    @staticmethod
    def reset(request):
        request.transport.abort()
        return web.Response()

    async def forward_later(self, request, body):
        await asyncio.sleep(self.random.uniform(0.02, 0.5))
        await self.forward(request, body)

    async def forward(self, request, body):
        headers = {name: value for name, value in request.headers.items() if name.lower() != "transfer-encoding"}
        skipped = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
        url = self.target + request.raw_path
        async with self.session.request(
            request.method, url, data=body or None, headers=headers, skip_auto_headers=skipped
        ) as reply:
            content = await reply.read()
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in _OWN_HEADERS}
            return reply.status, content, kept, reply.headers.get("Content-Length", "0")


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
