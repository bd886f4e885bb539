"""Clients that attack a server, many at once, until they are stopped.

    python tests/attacks/hostile_clients.py PORT half_open,slow_bodies 400

They run in a process of their own, so that measurements of the server are not slowed by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import sys
from collections.abc import Awaitable, Callable

KEY = b"key"
HEADERS = b"host: x\r\nauthorization: Bearer " + KEY + b"\r\ncontent-type: application/json\r\n"
COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS


class Client:
    """One connection, reopened for each attack of a kind."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.random = port, random.Random(seed)

    async def open(self, *, window: int | None = None) -> None:
        """Connect; ``window`` is the size of the receive buffer in bytes."""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if window is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", self.port))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def receive(self, size: int = 65536) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, size)

    async def read(self) -> bytes:
        """Everything until the server closes the connection."""
        received = b""
        while part := await self.receive():
            received += part
        return received

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def request(body: bytes, head: bytes = COMPLETIONS) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def half_open(client: Client) -> None:
    """Connections without a request, or with half a line of one."""
    await client.open()
    await client.send(client.random.choice((b"", b"", b"GET /heal", b"\x16\x03\x01")))
    await client.read()


async def slow_headers(client: Client) -> None:
    """A header a second."""
    await client.open()
    await client.send(b"GET /v1/models HTTP/1.1\r\n" + HEADERS)
    while True:
        await client.send(b"a: b\r\n")
        await asyncio.sleep(1)


async def slow_bodies(client: Client) -> None:
    """A body of 4 MB, a quarter at once and the rest by the byte."""
    await client.open()
    await client.send(COMPLETIONS + b"content-length: 4000000\r\n\r\n" + b'{"prompt": "' + b"1" * 1_000_000)
    while True:
        await client.send(b"1")
        await asyncio.sleep(1)


async def large_prompts(client: Client) -> None:
    """Prompts of 4 MB, with a pause after the answer."""
    await client.open()
    await client.send(request(json.dumps({"prompt": "1" * 4_000_000}).encode()))
    await client.receive()
    await asyncio.sleep(1)


async def deep_json(client: Client) -> None:
    """Bodies of 1 MB that cost much to read: nesting, tiny values, strings of escapes."""
    await client.open()
    bodies = (b'{"a":' * 200_000, b'{"a": [' + b"[]," * 300_000, b'{"a": "' + b"\\\\" * 500_000 + b'"}', b'"' * 10**6)
    await client.send(request(client.random.choice(bodies)))
    await client.receive()
    await asyncio.sleep(1)


async def leaving(client: Client) -> None:
    """Streams, uploads and waiting requests that are reset."""
    await client.open()
    body = {"prompt": "1+2=", "max_tokens": 200, "ignore_eos": True, "stream": client.random.random() < 0.7}
    content = request(json.dumps(body).encode())
    await client.send(content[: client.random.choice((len(content), len(content), 200))])
    if client.random.random() < 0.7:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.receive(300), client.random.uniform(0, 3))
    client.close(reset=client.random.random() < 0.5)
    await asyncio.sleep(2)


async def unread(client: Client) -> None:
    """Pipelined requests whose answers are never read."""
    await client.open(window=4096)
    for _ in range(20):
        await client.send(b"GET /v1/models HTTP/1.1\r\n" + HEADERS + b"\r\n")
        await asyncio.sleep(1)


async def garbage(client: Client) -> None:
    """What is not HTTP, or is expensive to parse."""
    await client.open()
    chunked = COMPLETIONS + b"transfer-encoding: chunked\r\n\r\n"
    await client.send(
        client.random.choice(
            (
                client.random.randbytes(1000),
                b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30_000 + b"\r\n",
                b"GET /" + b"x" * 200_000,
                chunked + b"1\r\n1\r\n" * 30_000,
                chunked + b"1\r\n1\r\n0\r\n" + b"a: b\r\n" * 30_000 + b"\r\n",
                b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 5 + b"\x00\r\n\r\n",
                request(b"x" * 100_000, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"),  # without a key
                request(b"", COMPLETIONS + b"content-encoding: gzip\r\n"),
            )
        )
    )
    await client.read()
    await asyncio.sleep(2)


ATTACKS: dict[str, Callable[[Client], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (half_open, slow_headers, slow_bodies, large_prompts, deep_json, leaving, unread, garbage)
}


async def repeat(attack: Callable[[Client], Awaitable[None]], client: Client) -> None:
    """Attack again and again, whatever the server does."""
    while True:
        with contextlib.suppress(OSError):
            await attack(client)
        client.close()
        await asyncio.sleep(client.random.random())  # the server may have closed the connection at once


async def main(port: int, kinds: list[str], clients: int) -> None:
    """``clients`` clients; those of the costly kinds are 8 at most."""
    tasks = []
    for kind in kinds:
        several = min(clients // len(kinds), 8 if kind in ("large_prompts", "deep_json") else clients)
        tasks += [repeat(ATTACKS[kind], Client(port, seed)) for seed in range(several)]
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])))
