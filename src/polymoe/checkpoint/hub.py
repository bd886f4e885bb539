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

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EXPECTED = "an existing path, or a Hub id like org/name"
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
    name = require_name(path_or_hub_id)
    if name is None:
        return Path(path_or_hub_id)
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
                expected=_EXPECTED,
                got="no such path, and no files of this repository in the Hub's cache; HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, or name a directory with the checkpoint",
            ) from error
        raise CheckpointNotFound(name, expected=_EXPECTED, **_of_the_hub(error)) from error
    except RuntimeError as error:
        if os.path.expanduser("~") != "~":
            raise
        raise CheckpointNotFound(
            name,
            expected=_EXPECTED,
            got="no such path, and no home directory in which the Hub's cache could be",
            hint="name a directory with the checkpoint, or set HF_HOME to one for the Hub's cache",
        ) from error


def in_cache(name: str) -> bool:
    """Whether the Hub's cache has a directory of this repository. Whole or not, only :func:`locate` tells."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").exists()


def require_name(path_or_hub_id: str | PurePath) -> str | None:
    """Return None for an existing path, else the text of what may be a Hub id. Nothing is looked up in the Hub.

    Raises:
        CheckpointNotFound: if it can be neither.
    """
    path = Path(path_or_hub_id)
    if path_or_hub_id != "" and exists(path):
        return None
    # A path of Windows would have other separators than a Hub id.
    name = path_or_hub_id.as_posix() if isinstance(path_or_hub_id, PurePath) else path_or_hub_id
    if name and path.is_symlink():
        hint = "correct the link, or name the directory itself"
        raise CheckpointNotFound(name, expected=_EXPECTED, got=f"a broken link to {os.readlink(path)}", hint=hint)
    if not HUB_ID.fullmatch(name) or Path(name.split("/")[0]).exists():
        raise CheckpointNotFound(
            name or "''", expected=_EXPECTED, got="neither", hint=_nearest_path(path) if name else None
        )
    return name


def _of_the_hub(error: Exception) -> dict[str, str]:
    """What happened, and what to do: a name that is wrong, a repository that is gated, or no connection."""
    from huggingface_hub import errors

    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, errors.GatedRepoError):
        said = "the Hub gives this repository only to those who accepted its terms"
        hint = "accept its terms on its page and log in: hf auth login"
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = "the Hub has no such repository, or not for you"
        hint = "check the name; for a private repository, log in: hf auth login"
    elif isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError)):
        said, hint = f"the Hub answered: {first_line}", "check the name"
    else:
        said = f"the Hub could not be reached: {first_line.removeprefix('Got: ')}"
        hint = "check the network, or name a directory with the checkpoint"
    return {"got": f"not a local path, and {said}", "hint": hint}


def _nearest_path(path: Path) -> str | None:
    """A hint for a path that does not exist: the one most like it in the deepest directory that does."""
    parts = Path(os.path.expanduser(path)).parts
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
