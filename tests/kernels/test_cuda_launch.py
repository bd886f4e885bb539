"""The launches that rows of kernels name: arguments, kernels and values are those of the sources and the launcher."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

import pytest
import torch

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.build import sources
from polymoe.kernels.cuda.launch import args
from polymoe.kernels.cuda.launch.call import PreparedCall
from polymoe.kernels.cuda.launch.layer import ActivationArgs, Layer, Matrix
from polymoe.kernels.cuda.launch.shape import CallShape, Tiles, permutation_words, steps_of
from polymoe.kernels.cuda.launch.steps import BY_TOKEN
from polymoe.kernels.cuda.slots import PlaceExpertsArgs
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES, KernelFamily
from polymoe.kernels.cuda.targets import SM90, TARGETS
from support.cuda_emulator import Recorded

STRUCTURES = [s for s in vars(args).values() if isinstance(s, type) and issubclass(s, ctypes.Structure)]
STRUCTURES += [PlaceExpertsArgs]  # that of fetch_experts has arrays, too
KINDS = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "float": ctypes.c_float,
}
NOT_SET = {"top_k", "x_dtype", "tiles", "expanded_to_permuted", "router_weights", "counts", "input_scales"}
"""Arguments that a launch may leave at 0."""


@cache
def structs() -> dict[str, list[tuple[str, type]]]:
    """Own fields of every structure in the sources."""
    found = {}
    for text in sources().values():
        for name, body in re.findall(r"\nstruct (\w+Args)(?: : \w+)? {\n(.*?)\n};", text, re.S):
            code = re.sub("//.*", "", body)
            fields = []
            for kind, pointer, names in re.findall(r"(?:const )?([\w ]+?)(\*)? (\w+(?:, \w+)*);", code):
                fields += [(name, ctypes.c_void_p if pointer else KINDS[kind.strip()]) for name in names.split(", ")]
            found[name] = fields
    return found


@cache
def signatures() -> dict[str, str]:
    """The structure that each kernel takes."""
    return dict(re.findall(r"^POLYMOE_KERNEL\((\w+), (\w+),", "\n".join(sources().values()), re.M))


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.__name__)
def test_structures_are_those_of_the_sources(structure: type[ctypes.Structure]) -> None:
    assert [tuple(field[:2]) for field in structure._fields_] == structs()[structure.__name__]


def test_every_gpu_s_instructions_are_those_of_a_kernel() -> None:
    assert {f.instructions for f in KERNEL_FAMILIES.values()} == {"mma", "mma_tiled", "wgmma"}
    assert [t.name for t in TARGETS.values() if not t.families] == ["sm80"]


def layer(family: KernelFamily, static: bool, gated: bool) -> Layer:
    format, scales = next(iter(family.formats)), torch.ones(4)
    up, down = (
        Matrix(format, torch.zeros(4, 8, dtype=torch.uint8), None, n, k, input_scale=scales if static else None)
        for n, k in ((512 if gated else 256, 512), (512, 256))
    )
    return Layer(up, down, gated, ActivationArgs(0), 4, False, 132, SM90, SM90.budget)


CELLS = [
    pytest.param(family, gated, static, id=f"{family.name}{'-gated' * gated}{'-static' * static}")
    for family in KERNEL_FAMILIES.values()
    for gated in (True, *([False] if not family.gated_only else []))
    for static in (False, *([True] if "fp8_static" in family.activations else []))
]


@pytest.mark.parametrize(("family", "gated", "static"), CELLS)
def test_launches_have_what_kernels_take(
    monkeypatch: pytest.MonkeyPatch, family: KernelFamily, gated: bool, static: bool
) -> None:
    """In every configuration and for several numbers of tokens: kernels of the sources, each with its structure, whose
    fields are all named in the launch or constants of the layer."""
    made: list[tuple[str, Any, int, int]] = []

    def kernel(unit: str, name: str, target: Any) -> Recorded:
        return Recorded(lambda args, grid, threads, shared: made.append((name, args, grid, threads)))

    monkeypatch.setattr(modules, "kernel", kernel)
    tiles = [Tiles(m, narrow_m=n) for m in family.tiles for n in (0, *(b for a, b in family.narrow if a == m))]
    for tile in tiles:
        call = PreparedCall(layer(family, static, gated), family, tile)
        rounded = family.quantized_x and not static
        for tokens, top_k, quantized in ((1, 1, False), (40, 1, rounded), (3000, 1, False), (3000, 2, False)):
            made.clear()
            call.resize(tokens, top_k, quantized=quantized)
            call.run(0, ((1024,), (16, 32, 48, 64), (0, 1, True, 2)))
            shape = CallShape(call.layer, family, tile, tokens, top_k)
            steps = [
                step
                for step in steps_of(family, BY_TOKEN if quantized else shape.planned_input)
                if shape.numbers()[step.when] and (tile.narrow_m or not step.narrow)
            ]
            assert len(made) == len(steps)
            for step, (name, found, grid, threads) in zip(steps, made, strict=True):
                assert signatures()[name] == type(found).__name__
                assert threads % 32 == 0
                assert all(size > 0 for size in grid)
                fields = {n for kind in type(found).__mro__ for n, *_ in getattr(kind, "_fields_", ())}
                constants = set(dict(args.GemmArgs._fields_)) if isinstance(found, args.GemmArgs) else set()
                assert set(step.fields) <= fields
                assert fields - set(step.fields) - constants <= NOT_SET


@pytest.mark.parametrize("family", KERNEL_FAMILIES.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [1, 33, 3000])
def test_arrays_of_the_workspace_do_not_overlap(family: KernelFamily, tokens: int) -> None:
    block_m = next(iter(family.tiles))
    shape = CallShape(layer(family, False, True), family, Tiles(block_m), tokens, 2)
    offsets, size = shape.workspace()
    words = permutation_words(2 * tokens, 4, block_m, family.y == "bf16_rows")
    ends = [offsets[name] + 4 * count for name, count in words.items()]
    regions = [offsets[name] for name in ("x_rows", "h", "rounded_h", "y")]
    assert [offsets[name] for name in words] == [0, *ends[:-1]]
    assert ends[-1] <= regions[0] < ends[-1] + 256
    assert [*regions, size] == sorted([*regions, size])
    assert regions[1] - regions[0] >= (0 if shape.planned_input.step is None else tokens * 512)
    assert size - regions[3] >= 2 * tokens * 512 * (2 if family.y == "bf16_rows" else 4)
