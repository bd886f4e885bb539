"""Packed experts of models that Transformers splits over processes: tensor and expert parallelism, on two CPUs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polymoe.errors import UnsupportedProblem

pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.expert_parallel")

from polymoe.engines.transformers.quantizer import PackedConfig, PackedQuantizer

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "models").glob("sums-*/config.json"))
MODELS = [config.parent for config in CONFIGS if "quantization_config" in config.read_text()]
REFUSED = {
    # slices that cut groups of scales
    "sums-glm-4-nvfp4 tp": "72 is not a multiple of 16",
    "sums-mixtral-awq tp": "64 is not a multiple of 128",
    "sums-nemotron-h-nvfp4 tp": "104 is not a multiple of 16",
    "sums-llama-4-fp8 tp": "q_proj: expected a number of heads that divides by tp_size=2, got 5 of 32 features",
    # Transformers' own: no plan
    "sums-llama-4-fp8 ep": "has no `ep_plan`",
}
WHOLE = {"sums-gpt-oss-mxfp4 tp"}
"""Transformers' plan for tensor parallelism leaves these experts whole on each rank."""


def torchrun(*program: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    done = subprocess.run([*command, *map(str, program)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_two_ranks_compute_what_one_does(path: Path, tmp_path: Path) -> None:
    """Each with half of the experts, or half of each expert; or both refuse, and say why."""
    torchrun(ROOT / "tests" / "support" / "split_packed.py", tmp_path, path)
    for rank in range(2):
        for name, got in json.loads((tmp_path / f"rank-{rank}.json").read_text()).items():
            if name in REFUSED:
                assert REFUSED[name] in got["refused"]
                continue
            assert got["error"] < 1e-5, name
            mine, all_of_them = got["bytes"]
            assert mine == all_of_them if name in WHOLE else 0.3 < mine / all_of_them < 0.7, name


@pytest.mark.parametrize(
    ("sizes", "dense", "says"),
    [
        ({"pp_size": 2, "dp_size": 1}, None, "got pp_size=2"),
        ({"pp_size": 1, "dp_size": 2}, None, "got dp_size=2"),
        ({"pp_size": 1, "dp_size": 1}, object(), 'got dense="transformers"'),
        (None, None, "which splits models in another way"),
    ],
)
def test_other_ways_to_split_are_refused(sizes: dict[str, int] | None, dense: Any, says: str) -> None:
    quantizer = PackedQuantizer(PackedConfig({}))
    quantizer.dense = dense
    split = SimpleNamespace(**sizes) if sizes is not None else None
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=split), _mesh_manager="meshes")
    with pytest.raises(UnsupportedProblem, match=says):
        quantizer.read_others(model, SimpleNamespace(device_mesh="a mesh"))
