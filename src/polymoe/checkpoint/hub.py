"""Where a checkpoint is: an existing path, or a repository of the Hub, which is downloaded to the usual cache."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from polymoe.checkpoint.opener import exists
from polymoe.errors import CheckpointNotFound

__all__ = ["locate"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OTHER_FILES = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.tiktoken", "*/*.txt", "consolidated*", "adapter*")


def locate(path_or_hub_id: str | PurePath, patterns: Sequence[str], **hub: Any) -> Path:
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
    if path_or_hub_id != "" and exists(path):
        return path
    # A path of Windows would have other separators than a Hub id.
    name = path_or_hub_id.as_posix() if isinstance(path_or_hub_id, PurePath) else path_or_hub_id
    no_path = "an existing path, or a Hub id like org/name"
    if name and path.is_symlink():
        hint = "correct the link, or name the directory itself"
        raise CheckpointNotFound(name, expected=no_path, got=f"a broken link to {os.readlink(path)}", hint=hint)
    if not HUB_ID.fullmatch(name) or Path(name.split("/")[0]).exists():
        raise CheckpointNotFound(
            name or "''", expected=no_path, got="neither", hint=_nearest_path(path) if name else None
        )
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(patterns), ignore_patterns=list(OTHER_FILES), **hub
            )
        )
    # LocalEntryNotFoundError: offline and not in the cache. OSError covers failing connections.
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
            raise CheckpointNotFound(
                name,
                expected=no_path,
                got="no such path, and no files of this repository in the Hub's cache; HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, or name a directory with the checkpoint",
            ) from error
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointNotFound(
            name,
            expected=no_path,
            got=f"no such path, and from the Hub: {first_line}",
            hint="check the name, the network and, for gated models, that you are logged in",
        ) from error


def _nearest_path(path: Path) -> str | None:
    """A hint for a path that does not exist: the one most like it in the deepest directory that does."""
    parts = path.expanduser().parts
    there = Path()
    for part in parts:
        if exists(there / part):
            there /= part
            continue
        try:
            names = [entry.name for entry in there.iterdir()]
        except OSError:
            return None
        close = difflib.get_close_matches(part[:255], names, n=1)
        return f"did you mean {str(there / close[0])!r}?" if close else None
    return f"did you mean {str(there)!r}?" if parts else None  # with the home directory for ~
