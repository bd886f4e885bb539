"""A stand-in for a server: OpenAI's API with known delays and known faults, in threads of this process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from polymoe.bench.serving.client import Client, Server


def client_of(url: str, *, timeout_s: float = 600.0, api_key: str = "none", **more: Any) -> Client:
    """A client as ``bench serve`` makes it from its options."""
    return Client(Server(url=url, api_key=api_key, timeout_s=timeout_s), **more)


@dataclass
class Standin:
    """What the server does, and what it saw.

    A prompt's tokens are its words and ``added``. Answers are as long as asked, ``first_s`` to the first token and
    ``gap_s`` to each further one.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    added: int = 1
    stops_after: int | None = None
    bundle: int = 1
    streams: bool = True
    usage: bool = True
    cached_tokens: int | None = None
    done: bool = True
    refuses: tuple[str, ...] = ()
    context: int = 100_000
    one_by_one: bool = False
    room: int | None = None
    breaks: dict[int, str] = field(default_factory=dict)
    models: tuple[str, ...] = ("words",)
    max_model_len: int | None = None
    owner: str = "standin"
    key: str | None = None

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Requests for more than the few tokens of a probe or a warm-up."""
        return [body for body in self.asked if body["stream"] and body["max_tokens"] > 8]

    @contextlib.contextmanager
    def running(self) -> Iterator[Standin]:
        server = _Server(("127.0.0.1", 0), _Handler)
        server.standin = self
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def count(self, body: dict[str, Any]) -> int:
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        return len(text.split()) + self.added


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    standin: Standin


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        s = self.server.standin
        if self.path == "/v1/models":
            about = {"owned_by": s.owner, "max_model_len": s.max_model_len}
            self._json(200, {"data": [{"id": name, **about} for name in s.models]})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        s = self.server.standin
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if s.key is not None and self.headers.get("Authorization") != f"Bearer {s.key}":
            return self._json(401, {"error": {"message": "wrong key"}})
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self._json(404, {"detail": "Not Found"})
        with s.lock:
            number = len(s.measured)
            s.asked.append(body)
            full = s.room is not None and s.under_way >= s.room and body in s.measured
            s.under_way += not full
            s.most = max(s.most, s.under_way)
        try:
            if full:
                self._json(429, {"error": {"message": "no room", "code": "queue_full"}})
            elif wrong := [name for name in s.refuses if name in body]:
                self._json(422, {"detail": f"Unexpected fields in the request: {wrong}"})
            elif s.count(body) > s.context:
                self._json(400, {"error": {"message": f"the context holds {s.context} tokens"}})
            else:
                fault = s.breaks.get(number) if body in s.measured else None
                with s.turn if s.one_by_one else contextlib.nullcontext():
                    self._answer(body, fault)
        finally:
            with s.lock:
                s.under_way -= not full

    def _answer(self, body: dict[str, Any], fault: str | None) -> None:
        s = self.server.standin
        tokens = min(body["max_tokens"], s.stops_after or body["max_tokens"])
        if body.get("ignore_eos"):
            tokens = body["max_tokens"]
        usage: dict[str, Any] = {"prompt_tokens": s.count(body), "completion_tokens": tokens}
        if s.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": s.cached_tokens}
        chat = "messages" in body
        reason = "length" if tokens == body["max_tokens"] else "stop"
        if fault in ("400", "500"):
            self._json(int(fault), {"error": "a fault"})
        elif not (body["stream"] and s.streams):
            time.sleep(s.first_s + s.gap_s * (tokens - 1))
            said: dict[str, Any] = {"message": {"content": " word" * tokens}} if chat else {"text": " word" * tokens}
            whole = {"choices": [{**said, "finish_reason": reason}], **({"usage": usage} if s.usage else {})}
            self._json(200, whole)
        else:
            self._stream(
                tokens, chat, reason, usage if (body.get("stream_options") or {}).get("include_usage") else {}, fault
            )

    def _stream(self, tokens: int, chat: bool, reason: str, usage: dict[str, Any], fault: str | None) -> None:
        s = self.server.standin
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        self._chunk(b": a comment\n\n")
        due = time.perf_counter() + s.first_s
        for sent in range(0, tokens, s.bundle):
            # Each at its time, however late the one before it was: delays do not add up.
            time.sleep(max(0.0, due - time.perf_counter()))
            if fault is not None and sent:
                self._fault(fault)
                return
            text = " word" * min(s.bundle, tokens - sent)
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            due += s.bundle * s.gap_s
        last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": reason}], "usage": None}
        self._event(last if chat else {"choices": [{"text": "", "finish_reason": reason}]})
        if s.usage and usage:
            self._event({"choices": [], "usage": usage})
        if s.done:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _fault(self, fault: str) -> None:
        if fault == "error":
            self._event({"error": {"message": "out of memory"}})
        elif fault == "nonsense":
            self._chunk(b"data: {nonsense\n\n")
        if fault != "cut":
            self._chunk(b"")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the client has seen enough
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
