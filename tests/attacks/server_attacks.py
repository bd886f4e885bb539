"""A server under attack: how fast it answers, what it holds, and how it ends.

python -m tests.attacks.server_attacks --seconds 600                  # every attack at once, for ten minutes
python -m tests.attacks.server_attacks --kinds half_open,slow_bodies  # some of them
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from attacks.hostile_clients import ATTACKS  # noqa: E402
from attacks.reports import made  # noqa: E402
from polymoe.common.atomic import append_line  # noqa: E402

__all__ = ["Measured", "attack"]

CLIENTS = Path(__file__).with_name("hostile_clients.py")
CHECKPOINT = ROOT / "models" / "sums-gpt-oss-mxfp4"
DESCRIPTORS = 4096
SERVER = """
from polymoe.cli import main
from polymoe.serve import app, prompts
prompts.START = 10**9
app.longest_token = lambda _: 10**6  # so that prompts of 4 MB are tokenized, as by models with a large context
main()
"""


OPTIONS = ("--api-key", "key", "--device", "cpu")


@dataclass
class Measured:
    """What an attack did.

    Attributes:
        health_s: seconds that each request of ``/health`` took, one after the other, every tenth of a second.
        served_s: the same without the time for which the server or this process waited for a processor: other programs
            on the machine are not the server's fault.
        failed: requests of ``/health`` that got no answer, or another one than 200.
        answers: answers to sums that were asked meanwhile, by kind: "right", "wrong", a status, or an error.
        resident_bytes, descriptors: of the server, about once a second.
        processor_s, wall_s: processor time of the server during the attack, and the attack's duration.
        log_bytes: what the server wrote to its log.
        stopped_s: from SIGTERM, under attack, to the end of the process.
        stop_waited_s: what of this it waited for a processor.
        exit_code, tracebacks: of the process; of its log.
    """

    health_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    resident_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    processor_s: float = 0.0
    wall_s: float = 0.0
    log_bytes: int = 0
    stopped_s: float = 0.0
    stop_waited_s: float = 0.0
    exit_code: int | None = None
    tracebacks: int = 0

    def growth(self, values: list[int]) -> float:
        """The last fifth of some values over the second fifth; the server warms up in the first."""
        fifth = max(1, len(values) // 5)
        return statistics.median(values[-fifth:]) / statistics.median(values[fifth : 2 * fifth] or values)

    def summary(self) -> dict[str, Any]:
        """The numbers in short."""
        health = sorted(self.health_s)
        return {
            "health": len(health),
            "health_median_s": round(statistics.median(health), 4),
            "health_p99_s": round(health[int(0.99 * len(health))], 3),
            "health_longest_s": round(health[-1], 3),
            "served_longest_s": round(max(self.served_s), 3),
            "failed": self.failed[:5],
            "resident_mb": [round(value / 1e6) for value in (min(self.resident_bytes), max(self.resident_bytes))],
            "resident_growth": round(self.growth(self.resident_bytes), 3),
            "descriptors": [min(self.descriptors), max(self.descriptors)],
            "descriptor_growth": round(self.growth(self.descriptors), 3),
            "answers": dict(self.answers),
            "processor": round(self.processor_s / self.wall_s, 2),
            "log_bytes": self.log_bytes,
            "tracebacks": self.tracebacks,
            "stopped_s": round(self.stopped_s, 2),
            "stop_waited_s": round(self.stop_waited_s, 2),
            "exit_code": self.exit_code,
        }


def attack(kinds: list[str], seconds: float, clients: int = 400) -> Measured:
    """Start a server with 4,096 file descriptors, attack it, and end it while it is attacked."""
    found = Measured()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, "serve", str(CHECKPOINT), "--port", str(port := _free_port()), *OPTIONS],
            stdout=log,
            stderr=log,
            env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        stack.callback(server.kill)
        while _ask(port, "GET", "/health")[0] != "200":
            assert server.poll() is None, "the server has not started"
            time.sleep(0.1)
        command = [sys.executable, str(CLIENTS), str(port), ",".join(kinds), str(clients)]
        attackers = subprocess.Popen(command)
        stack.callback(attackers.wait)
        stack.callback(attackers.kill)
        ended = threading.Event()
        asking = threading.Thread(target=_ask_sums, args=(found, port, ended))
        asking.start()
        stack.callback(asking.join)
        stack.callback(ended.set)
        _measure(found, server.pid, port, seconds)
        ended.set()
        asking.join()
        _stop(found, server)
        log.seek(0)
        text = log.read()
        found.log_bytes, found.tracebacks = len(text), text.count("Traceback")
        if found.tracebacks:
            print(text[-4000:], file=sys.stderr)
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _measure(found: Measured, pid: int, port: int, seconds: float) -> None:
    start, used = time.monotonic(), _processor_s(pid)
    last = 0.0
    while (now := time.monotonic() - start) < seconds:
        asked, waited = time.monotonic(), _waited_s(pid)
        status, _ = _ask(port, "GET", "/health")
        found.health_s.append(time.monotonic() - asked)
        found.served_s.append(found.health_s[-1] - _waited_s(pid) + waited)
        if status != "200":
            found.failed.append(f"{now:.1f} s: {status}")
        if now - last >= 1:
            last = now
            found.resident_bytes.append(_resident_bytes(pid))
            found.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.1)
    found.wall_s, found.processor_s = time.monotonic() - start, _processor_s(pid) - used


def _ask_sums(found: Measured, port: int, ended: threading.Event) -> None:
    """One after the other, at most one a second."""
    while not ended.wait(1):
        status, text = _ask(port, "POST", "/v1/completions", {"prompt": "12+34=", "max_tokens": 4})
        right = status == "200" and json.loads(text)["choices"][0]["text"] == "46"
        found.answers["right" if right else "wrong" if status == "200" else status] += 1


def _stop(found: Measured, server: subprocess.Popen[bytes]) -> None:
    start, waited = time.monotonic(), _waited_s(server.pid)
    server.send_signal(signal.SIGTERM)
    while server.poll() is None and found.stopped_s < 30:
        found.stopped_s = time.monotonic() - start
        found.stop_waited_s = max(found.stop_waited_s, _waited_s(server.pid) - waited)
        time.sleep(0.02)
    found.exit_code = server.poll()


def _ask(port: int, method: str, path: str, body: Any = None) -> tuple[str, str]:
    """Status and text of an answer; for no answer, the error and nothing."""
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return str(answer.status), answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, ""


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _waited_s(server: int) -> float:
    """How long the server's event loop and this process were ready to run, and did not."""
    try:
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in (server, os.getpid())) / 1e9
    except OSError:
        return 0.0


def _processor_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Attack, and print what was measured."""
    parser = argparse.ArgumentParser(description="Attack a server and measure it.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kinds", default=",".join(ATTACKS), help="of: " + ", ".join(ATTACKS))
    parser.add_argument("--clients", type=int, default=400)
    parser.add_argument("--record", type=Path, help="add a record to this file")
    parser.add_argument("--commit", help="for the record, if git does not know it")
    arguments = parser.parse_args()
    found = attack(arguments.kinds.split(","), arguments.seconds, arguments.clients)
    print(json.dumps(found.summary(), indent=2))
    if arguments.record is not None:
        command = f"python -m tests.attacks.server_attacks --seconds {arguments.seconds:g} --kinds {arguments.kinds}"
        if arguments.kinds == ",".join(ATTACKS):
            command = command.partition(" --kinds")[0]
        asked = {"server": arguments.kinds.split(","), "clients": arguments.clients, "seconds": arguments.seconds}
        append_line(arguments.record, json.dumps({**asked, **found.summary(), **made(command, arguments.commit)}))


if __name__ == "__main__":
    main()
