"""HttpServer: uvicorn's server with the connections of :mod:`polymoe.serve.connections`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from polymoe.serve.connections import Connection, Connections
from polymoe.serve.log_limit import limited_logs

__all__ = ["HttpServer"]


class HttpServer(uvicorn.Server):
    """An HTTP/1.1 server for one ASGI application.

    Args:
        app: the application.
        listener: a listening socket.
        max_connections: more than these close those that have waited longest for a whole request.
        stop_s: how long answers may continue after a signal.
        on_ready: called once the server answers.
        on_stop: called in the event loop when it starts to end.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        max_connections: int,
        stop_s: float,
        on_ready: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",  # what the tests use, whatever else is installed; the next two too
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # Longer than clients keep an idle connection, so that the server never closes one that is about to be used.
            timeout_keep_alive=30,
            timeout_graceful_shutdown=stop_s,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._listener, self._max_connections = listener, max_connections
        self._on_ready, self._on_stop = on_ready, on_stop

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        with limited_logs():
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""

        def protocol(connections: Connections) -> Connection:
            return Connection(connections, config=self.config, server_state=self.server_state, app_state={})

        self.connections = Connections(self._listener, self._max_connections, protocol)
        self.servers: list[Any] = [self.connections]  # uvicorn closes them
        self.started = True
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, and wait for running answers."""
        self._on_stop()
        await super().shutdown([self._listener])
