"""Out of memory is one message: needed, free, and a hint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polymoe.cli.memory import out_of_memory

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77 GiB memory in use."
)


def test_on_a_gpu() -> None:
    said = out_of_memory(torch.OutOfMemoryError(CUDA)) or ""
    assert said.startswith("out of GPU memory: needed 2.00 GiB for one tensor, free 1.25 GiB of 79.11 GiB\n")
    assert "--device-map auto" in said
    assert (out_of_memory(torch.OutOfMemoryError("?")) or "").startswith("out of GPU memory: needed more")


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory(RuntimeError("shapes differ")) is None
    assert out_of_memory(ValueError("can't allocate memory")) is None


@pytest.mark.parametrize("kind", ["torch", "python"])
def test_on_the_host(kind: str, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    import polymoe.verify

    def fill(*_: object, **__: object) -> None:
        if kind == "torch":
            torch.empty(2**60, dtype=torch.uint8)
        raise MemoryError

    monkeypatch.setattr(polymoe.verify, "verify", fill)
    code, out, err = cli("verify", SUMS)
    assert (code, out) == (1, "")
    assert "error: out of memory: needed " in err
    assert ("1152921504606846976 bytes" in err) == (kind == "torch")
    assert "GiB of" in err
    assert "hint: " in err
    assert "Traceback" not in err
