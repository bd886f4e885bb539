"""The link from host memory to a GPU: nominal rates, and what ``polymoe doctor --link`` measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from polymoe.common.atomic import replace_file
from polymoe.common.environment import cache_directory
from polymoe.common.json_input import parse_json

if TYPE_CHECKING:
    from pathlib import Path

LINKS = (("PCIe 4 x16, 26 GB/s", 26e9), ("PCIe 5 x16, 55 GB/s", 55e9))
"""Nominal rates from host memory to the GPU, bytes/s."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """How fast a GPU gets what lies in page-locked host memory.

    Attributes:
        device: name of the GPU, as ``--device`` takes it.
        copy_bytes_per_s: by its copy engine, as prompts are run.
        kernel_bytes_per_s: by the kernel that reads host memory itself, as tokens are decoded.
        record_bytes: of each expert that was copied.
        record_us: of one expert alone, by the kernel.
    """

    device: str
    copy_bytes_per_s: float
    kernel_bytes_per_s: float
    record_bytes: int
    record_us: float

    def save(self) -> Path | None:
        """Write it to the cache directory, in place of another one of this GPU; None without a cache."""
        path = _path()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({**_read(path), self.device: asdict(self)}, indent=1) + "\n")
        return path

    def __str__(self) -> str:
        return (
            f"{self.device}: copy engine {self.copy_bytes_per_s / 1e9:.1f} GB/s, kernel "
            f"{self.kernel_bytes_per_s / 1e9:.1f} GB/s, {self.record_bytes / 2**20:g} MiB alone {self.record_us:.0f} us"
        )


def recorded_link(device: str) -> MeasuredLink | None:
    """Return what was measured on this machine for a GPU of this name; None if nothing was, or it cannot be read."""
    path = _path()
    found = _read(path).get(device) if path is not None else None
    try:
        return MeasuredLink(**found) if isinstance(found, dict) else None
    except TypeError:
        return None


def links(device: str) -> Sequence[tuple[str, float]]:
    """Return names and rates, bytes/s, of links that a GPU may have: the measured one alone, or the nominal ones."""
    found = recorded_link(device)
    return (
        LINKS
        if found is None
        else ((f"measured, {found.kernel_bytes_per_s / 1e9:.1f} GB/s", found.kernel_bytes_per_s),)
    )


def _path() -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / "links.json"


def _read(path: Path) -> dict[str, object]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
