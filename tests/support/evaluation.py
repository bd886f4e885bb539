"""What tests of `polymoe eval` share: small sets, records, and a server whose answers a test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polymoe.evaluate.records import AnswerRecord

Reply = tuple[int, Any, dict[str, str]]
Answer = Callable[[dict[str, Any], int], Reply]


def said(text: str | None, *, finish_reason: str = "stop", tokens: int = 3) -> Reply:
    """A response that says ``text``, in the form of both endpoints."""
    choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    return 200, {"choices": [{**choice, "finish_reason": finish_reason}], "usage": usage}, {}


def refused(status: int, message: str = "no", **headers: str) -> Reply:
    """An error as OpenAI's API has it; ``retry_after="0"`` becomes a header."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return status, body, {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass
class Scripted:
    """The running server, and what came.

    Attributes:
        url: without a path.
        requests: bodies, in the order in which they came, with ``path`` and ``key`` added.
        most_at_once: of requests being answered.
    """

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def dump(body: Any) -> bytes:
    return json.dumps(body).encode()


@contextmanager
def serving(answer: Answer, models: tuple[str, ...] = ("small",)) -> Iterator[Scripted]:
    """Serve ``answer(body, how many requests came before)``: status, body and headers. A body is written as JSON, bytes
    as they are, and parts of an iterator one after the other, without a length."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
            self.reply(200 if models else 404, found, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body |= {"path": self.path, "key": self.headers["authorization"]}
            with server.lock:
                number = len(server.requests)
                server.requests.append(body)
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            try:
                reply = answer(body, number)
            finally:
                with server.lock:
                    server.now -= 1
            self.reply(*reply)

        def reply(self, status: int, body: Any, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            parts = body if isinstance(body, Iterator) else [body if isinstance(body, bytes) else dump(body)]
            if isinstance(body, Iterator):
                self.close_connection = True
            else:
                self.send_header("content-length", str(len(parts[0])))
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:  # a client that went away
            pass

    with Server(("127.0.0.1", 0), Handler) as http:
        server = Scripted(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def sums(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(count)))
    return path


def add(body: dict[str, Any], _: int = 0) -> Reply:
    """What a model that can add answers."""
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return said(str(int(prompt.partition("+")[0]) + 1))


def record(question: str, repeat: int = 0, *, right: bool = True, **other: Any) -> AnswerRecord:
    given: dict[str, Any] = {
        "id": question, "repeat": repeat, "expected": "1", "answer": "1" if right else "2", "correct": right,
        "text": "", "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 10, "latency_us": 1_000_000,
        "ended_us": 10_000_000,
    }  # fmt: skip
    return AnswerRecord(**{**given, **other})
