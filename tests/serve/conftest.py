"""Tests of the server, which need what ``polymoe serve`` needs, and a client."""

from __future__ import annotations

from importlib.util import find_spec

if not all(map(find_spec, ("transformers", "fastapi", "uvicorn", "openai", "prometheus_client"))):
    collect_ignore_glob = ["test_*.py"]
