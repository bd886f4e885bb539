"""benchmarks/kernel_bits.py covers what may run, and tells what changed from what did not."""

from __future__ import annotations

import json
from pathlib import Path

import kernel_bits  # type: ignore
import pytest

from polymoe.backends.cuda.config import CudaConfig
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily


@pytest.mark.parametrize("family", KERNEL_FAMILIES.values(), ids=lambda family: family.name)
def test_has_whatever_the_heuristic_chooses(family: KernelFamily) -> None:
    choices = [c for device in ("", *family.on) for c in family.fitted(device).choices]
    chosen = {CudaConfig(family.name, c.block_m, c.block_n, narrow_m=c.narrow_m) for c in choices}
    if family.shorter is not None:
        chosen.add(CudaConfig(family.name, family.shorter.block_m, 0, family.shorter.instead))
    assert chosen <= set(kernel_bits.configurations(family))


def test_cells_that_differ_or_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"old": {"same": "1", "other": "2", "gone": "3"}, "new": {"same": "1", "other": "4", "more": "5"}}
    for side, cells in sides.items():
        lines = (json.dumps({"cell": cell, "found": found}) for cell, found in cells.items())
        (tmp_path / side).write_text("\n".join(["{}", *lines]) + "\n")
    old, new = tmp_path / "old", tmp_path / "new"
    assert kernel_bits.compare(old, new) == 3
    assert capsys.readouterr().out.splitlines() == [
        "other: differs", f"gone: only in {old}", f"more: only in {new}",
    ]  # fmt: skip
    assert kernel_bits.compare(old, old) == 0
