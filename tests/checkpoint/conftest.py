"""Checkpoints on disk that the tests of this directory share."""

from __future__ import annotations

import pytest

from support.written import Library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Call with a configuration's name for the directory of its checkpoint, written once a session: change none."""
    return Library(tmp_path_factory.mktemp("library"))
