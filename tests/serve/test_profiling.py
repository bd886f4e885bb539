"""The server's profiler: one trace at a time, of all threads, in the directory that the server was given."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("httpx")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from polymoe.errors import ArgumentError
from polymoe.serve.errors import answer_errors
from polymoe.serve.profiling import add_profiler, check_directory


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = FastAPI()
    add_profiler(app, tmp_path)
    answer_errors(app)
    return TestClient(app)


def elsewhere() -> None:
    """An operation in another thread than the profiler's."""
    thread = threading.Thread(target=lambda: torch.ones(3).cumsum(0))
    thread.start()
    thread.join()


def test_a_trace_has_what_other_threads_did_in_between(client: TestClient, tmp_path: Path) -> None:
    with client:  # one event loop, as in a server
        for _ in range(2):
            assert client.post("/start_profile", json={"output_dir": "/elsewhere"}).json() == {"status": "started"}
            elsewhere()
            trace = Path(client.post("/stop_profile", json={}).json()["trace"])
            assert trace.parent == tmp_path  # whatever a request says
            names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
            assert "aten::cumsum" in names
    assert len(list(tmp_path.iterdir())) == 2


def test_one_at_a_time(client: TestClient) -> None:
    with client:
        refused = client.post("/stop_profile")
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "no profile is running")
        client.post("/start_profile")
        refused = client.post("/start_profile")
        assert (refused.status_code, refused.json()["error"]["message"]) == (409, "a profile is already running")
        assert client.post("/stop_profile").status_code == 200
        assert client.get("/start_profile").status_code == 405


def test_serve_refuses_before_it_loads(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "no checkpoint").mkdir()
    code, out, err = cli("serve", tmp_path / "no checkpoint", "--profile", tmp_path / "file")
    assert (code, out) == (2, "")
    assert "--profile: expected a directory for traces" in err


def test_a_directory_is_made_or_refused(tmp_path: Path) -> None:
    check_directory(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="profile: expected a directory for traces"):
        check_directory(tmp_path / "file")
    if os.geteuid():
        (tmp_path / "new").chmod(0o500)
        with pytest.raises(ArgumentError, match="not writable"):
            check_directory(tmp_path / "new")
