"""The stored tensors of one expert: which exist, their headers, their data, and errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polymoe.checkpoint.arrangement import Arrangement, PerExpert
from polymoe.checkpoint.dialects import SUFFIXES
from polymoe.checkpoint.dialects.base import expect
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.checkpoint.naming import BIAS, tensor_name
from polymoe.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def full_names(name: Callable[[str], str], module: str = "", expert: int | None = None) -> Iterator[None]:
    """Replace suffixes in the errors of a dialect by the full name of the tensor."""
    try:
        yield
    except (CheckpointError, FormatError) as error:
        if error.where in (*SUFFIXES, BIAS):
            error.where = name(error.where) + ("" if expert is None else f"[{expert}]")
        elif isinstance(error, FormatError) and module:
            error.where = f"{module}: {error.where}"
        raise


def present_tensors(
    files: CheckpointFiles, container: str, arrangement: Arrangement, part: str, expert: int
) -> dict[str, str]:
    """Return the names of the part's existing tensors by suffix, including the bias."""
    names = {suffix: tensor_name(container, arrangement, part, expert, suffix) for suffix in (*SUFFIXES, BIAS)}
    return {suffix: name for suffix, name in names.items() if name in files}


def expert_header(files: CheckpointFiles, name: str, arrangement: Arrangement, moe: MoeConfig) -> Header:
    """Return the header of the tensor that :func:`expert_tensor` returns."""
    header = files.header(name)
    if isinstance(arrangement, PerExpert):
        return header
    shape = header.shape[1:] if _stacked(name, header, moe) else header.shape
    if arrangement.k_first and len(shape) >= 2:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Header(header.dtype, tuple(shape))


def expert_tensor(files: CheckpointFiles, name: str, arrangement: Arrangement, moe: MoeConfig, expert: int) -> Tensor:
    """Return one expert's tensor in natural order; a single number is shared by all experts."""
    if isinstance(arrangement, PerExpert):
        return files.get(name)
    tensor = files.get(name, expert if _stacked(name, files.header(name), moe) else None)
    return tensor.transpose(-1, -2) if arrangement.k_first and tensor.dim() >= 2 else tensor


def _stacked(name: str, header: Header, moe: MoeConfig) -> bool:
    if math.prod(header.shape) == 1 and len(header.shape) <= 1:
        return False
    if header.shape[0] != moe.experts:
        raise FormatError(
            name, expected=f"{moe.experts} experts along the first axis", got=f"shape {list(header.shape)}"
        )
    return True


def check_bias(headers: Mapping[str, Header], shape: tuple[int, int], expected: bool) -> None:
    """Check that an ``[N, K]`` matrix has a bias exactly if one is ``expected``: floats [N].

    Raises:
        CheckpointError: if it is missing, or superfluous.
        FormatError: for another dtype or shape.
    """
    if (BIAS in headers) != expected:
        words = ("no bias, as the first expert has none", "this bias, as the first expert has one")
        raise CheckpointError(BIAS, expected=words[expected], got=describe_header(headers.get(BIAS)))
    if expected:
        expect(headers, BIAS, ("BF16", "F16", "F32"), shape[:1])


def describe_header(header: Header | None) -> str:
    """Return dtype and shape of a tensor for a message; None is a missing tensor."""
    return f"{header.dtype} {list(header.shape)}" if header else "no such tensor"
