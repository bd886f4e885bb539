"""The repository for Hugging Face's package kernels, built from this tree's wheel and loaded from a local folder."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]

MODEL = """
import sys, torch
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("re2", "typer"):  # what Transformers does not need
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
{load}
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=8,
    num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, dtype="bfloat16",
)
torch.manual_seed(0)
model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
with torch.no_grad():
    ids = torch.arange(16)[None]
    model.set_experts_implementation("eager"); before = model(ids).logits
    model.set_experts_implementation("polymoe"); after = model(ids).logits
assert "_polymoe" in model.model.layers[0].mlp.experts.__dict__
error = float((after - before).norm() / before.norm())
assert error < 0.02, error
print(kernel.__name__, sys.modules["polymoe"].__file__)
"""

BY_KERNELS = "from pathlib import Path; from kernels import get_local_kernel; kernel = get_local_kernel(Path({repo!r}))"
BY_IMPORT = """
import importlib.util
spec = importlib.util.spec_from_file_location({name!r}, {repo!r} + "/build/torch-universal/__init__.py")
kernel = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub-kernel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, ROOT / "scripts/hub-kernel", wheel, folder / "repo"], check=True)
    return folder / "repo"


def run(code: str) -> subprocess.CompletedProcess[str]:
    # In isolated mode there is no PYTHONPATH. An installed polymoe is taken away.
    away = "import os, sys; sys.path = [p for p in sys.path if not os.path.isfile(p + '/polymoe/__init__.py')]\n"
    return subprocess.run([sys.executable, "-I", "-c", away + code], capture_output=True, text=True, cwd="/")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["kernels", "import"])
def test_a_model_runs_with_the_kernel_s_own_polymoe(repo: Path, by: str) -> None:
    if by == "kernels" and not list(metadata.distributions(name="kernels")):  # tests/kernels has the same name
        pytest.skip("needs the package kernels")
    name = json.loads((repo / "build/torch-universal/metadata.json").read_text())["id"]
    assert name.isidentifier()
    load = (BY_KERNELS if by == "kernels" else BY_IMPORT).format(repo=str(repo), name=name)
    done = run(MODEL.format(load=load))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name, str(repo / "build/torch-universal/packages/polymoe/__init__.py")]


@pytest.mark.slow
def test_another_version_of_polymoe_is_not_mixed_with_it(repo: Path) -> None:
    load = BY_IMPORT.format(repo=str(repo), name="k")
    other = "import sys, types; sys.modules['polymoe'] = p = types.ModuleType('polymoe')\n"
    done = run(f"{other}p.__version__ = '9'; p.__file__ = '/other/polymoe/__init__.py'\n{load}")
    assert done.returncode == 1
    assert "expected polymoe 0.1.0, got 9 from /other/polymoe" in done.stderr


@pytest.mark.slow
def test_an_existing_folder_is_refused(repo: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/hub-kernel"), "polymoe-0.1.0-py3-none-any.whl", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, "expected a folder that does not exist yet" in done.stderr) == (2, True)
