"""Where a checkpoint is: an existing path, or a repository of the Hub, which is downloaded to the usual cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polymoe.checkpoint.opener import exists
from polymoe.errors import CheckpointNotFound

__all__ = ["locate"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OTHER_FILES = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.tiktoken", "*/*.txt", "consolidated*", "adapter*")


def locate(path_or_hub_id: str | Path, patterns: Sequence[str], **hub: Any) -> Path:
    """Return an existing path, or the local directory of a Hub repository.

    Args:
        path_or_hub_id: an existing path, else ``org/name``.
        patterns: the files to download from a repository; none of its subdirectories but for chat templates.
        hub: for ``huggingface_hub.snapshot_download``: revision, cache_dir, token, local_files_only.

    Raises:
        CheckpointNotFound: if there is neither a path nor a repository of this name.
        CheckpointError: for a name that cannot be looked up.
    """
    path = Path(path_or_hub_id)
    if exists(path):
        return path
    name, no_path = str(path_or_hub_id), "an existing path, or a Hub id like org/name"
    if not HUB_ID.fullmatch(name) or Path(name.split("/")[0]).exists():
        raise CheckpointNotFound(name, expected=no_path, got="neither")
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(patterns), ignore_patterns=list(OTHER_FILES), **hub
            )
        )
    # LocalEntryNotFoundError: offline and not in the cache. OSError covers failing connections.
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointNotFound(
            name,
            expected=no_path,
            got=f"no such path, and from the Hub: {first_line}",
            hint="check the name, the network and, for gated models, that you are logged in",
        ) from error
