"""Transformers' own tests of models, from its source archive, with polymoe as the default of experts_implementation.

python tests/support/transformers_suite.py                   # five model types; exit 1 for a test that is lost
python tests/support/transformers_suite.py --record FILE     # append a line for each model type
python tests/support/transformers_suite.py mixtral           # only these, of support.small_models.FAMILIES

Each test runs twice in bfloat16 on the CPU, without polymoe and with it. A test is lost that passes only without it and
that polymoe does not refuse: reasons of refusals are counted and printed. The archive is PyPI's source distribution of
the installed version. It contains ``ModelTesterMixin``, but no test of a single model: configs are this project's. Pip
downloads it into ``.venv``; where it cannot, this says why and ends with 77.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
TYPES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h")
"""One for each kind of experts: gate rows before up rows; another activation; transposed, interleaved and with biases;
a router with sigmoids beside shared experts; without a gate."""

SOURCE, KINDS, IMPLEMENTATION = "POLYMOE_SUITE_SOURCE", "POLYMOE_SUITE_TYPES", "POLYMOE_SUITE_IMPLEMENTATION"
"""Environment variables of the processes that run the tests."""


def archive() -> Path:
    """The unpacked archive, and beside it the one package that its tests need and polymoe's do not.

    Raises:
        subprocess.CalledProcessError: if pip cannot download it.
    """
    version = importlib.metadata.version("transformers")
    folder = ROOT / ".venv" / f"transformers-tests-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        with tempfile.TemporaryDirectory(dir=folder.parent) as directory:
            source = [*pip, "download", "--no-deps", "--no-binary=transformers", f"--dest={directory}"]
            subprocess.run([*source, f"transformers=={version}"], check=True, capture_output=True, text=True)
            target = Path(directory) / "unpacked"
            package = [*pip, "install", "--no-deps", f"--target={target}", "parameterized"]
            subprocess.run(package, check=True, capture_output=True, text=True)
            (file,) = Path(directory).glob("*.tar.gz")
            with tarfile.open(file) as tar:
                (target / "tests").mkdir()
                for member in tar.getmembers():
                    name = member.name.partition("/")[2]
                    # By hand: Python before 3.10.12 and 3.11.4 has no filters that extract safely.
                    if re.fullmatch(r"tests/\w+\.py", name) and (content := tar.extractfile(member)):
                        (target / name).write_bytes(content.read())
            target.rename(folder)
    return folder


def passed_and_failed(source: Path, kinds: list[str], implementation: str) -> tuple[set[str], dict[str, str]]:
    """Run the tests in another process: those that passed, and the errors of those that failed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", "logical", "--maxprocesses", "8", "--timeout=600"]
        alone = ["-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "-p", "no:cacheprovider"]  # their own marks
        variables = {
            SOURCE: str(source),
            KINDS: " ".join(kinds),
            IMPLEMENTATION: implementation,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        run = subprocess.run(
            [*command, *alone, f"--junitxml={report}", __file__],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        if run.returncode not in (0, 1) or " passed" not in run.stdout:
            raise SystemExit(f"{run.stdout[-2000:]}{run.stderr[-2000:]}\npytest ended with {run.returncode}")
        passed: set[str] = set()
        failed: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            if (problem := case.find("failure")) is not None or (problem := case.find("error")) is not None:
                failed[name] = problem.get("message", "")
            elif case.find("skipped") is None:
                passed.add(name)
    return passed, failed


def reason(message: str) -> str | None:
    """What a refusal expected and got, without names and numbers of this test; None for another error."""
    found = re.search(r"UnsupportedProblem: [^\n]*?: (expected [^\n]*)", message)
    return found and found[1]


def compare(kinds: list[str]) -> list[dict[str, Any]]:
    """Run the tests twice; a record for each model type."""
    source = archive()
    passed, _ = passed_and_failed(source, kinds, "grouped_mm")
    again, failed = passed_and_failed(source, kinds, "polymoe")
    records: list[dict[str, Any]] = []
    for kind in kinds:
        own = {name for name in passed if name.startswith(f"Test_{kind}.")}
        lost = {name: failed.get(name, "not run") for name in sorted(own - again)}
        refused = Counter(why for message in lost.values() if (why := reason(message)) is not None)
        crashed = {name: message[:300] for name, message in lost.items() if reason(message) is None}
        counts = {"without": len(own), "with": len(own & again), "refused": dict(refused), "crashed": crashed}
        records.append({"model_type": kind, **counts})
    return records


def main() -> int:
    """Compare, print a table, and say what is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--record", type=Path, help="append a line for each model type to this file")
    options = parser.parse_args()
    try:
        records = compare(list(options.types))
    except subprocess.CalledProcessError as error:
        print(f"Transformers' own tests: skipped, no source archive: {error.stderr.strip().splitlines()[-1]}")
        return 77
    about = {
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "command": "python tests/support/transformers_suite.py",
    }
    for record in records:
        print(f"{record['model_type']}: {record['without']} pass without polymoe, {record['with']} with it")
        for why, count in record["refused"].items():
            print(f"  {count} refused: {why}")
        for name, message in record["crashed"].items():
            print(f"  lost: {name}: {message}")
        if options.record is not None:
            with options.record.open("a") as file:
                file.write(json.dumps({**record, **about}) + "\n")
    return int(any(record["crashed"] or not record["without"] for record in records))


def _lacking(module: str, name: str) -> None:
    """Stand in for a base class of Transformers' tests that the archive lacks."""
    made = types.ModuleType(module)
    setattr(made, name, type(name, (), {}))
    sys.modules[module] = made


def _tests() -> Iterator[tuple[str, type[unittest.TestCase]]]:
    """A class of tests for each model type."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from support.small_models import COMMON, FAMILIES

    sys.path.insert(0, os.environ[SOURCE])
    _lacking("tests.exporters.test_export", "ExportTesterMixin")
    _lacking("tests.generation.test_utils", "GenerationTesterMixin")
    common: Any = importlib.import_module("tests.test_modeling_common")

    class Tester:
        """A model's config and inputs, as ModelTesterMixin asks for them."""

        batch_size, seq_length, is_training = 3, 7, True

        def __init__(self, kind: str) -> None:
            self.sizes = {**COMMON, "num_hidden_layers": 2, "initializer_range": 0.02, **FAMILIES[kind]}
            self.kind = kind
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
                setattr(self, name, self.sizes[name])

        def get_config(self) -> Any:
            return AutoConfig.for_model(self.kind, **self.sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)

        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
            ids = torch.randint(3, self.sizes["vocab_size"], (self.batch_size, self.seq_length))
            return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    for kind in os.environ[KINDS].split():
        config = type(Tester(kind).get_config())
        mappings = (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
        classes = tuple(mapping[config] for mapping in mappings if config in mapping)

        def set_up(self: Any, kind: str = kind) -> None:
            self.model_tester = Tester(kind)

        body = {"setUp": set_up, "all_model_classes": classes, "__module__": __name__}
        name = f"Test_{kind}"
        yield name, type(name, (common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase), body)


if SOURCE in os.environ:
    from transformers import PreTrainedModel

    from polymoe.engines.transformers.experts_interface import register

    @pytest.fixture(autouse=True)
    def defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Models in bfloat16, with the implementation unless a test names one; the same random numbers each time."""
        choose = PreTrainedModel.get_correct_experts_implementation

        def chosen(self: Any, requested: str | None) -> str:
            return choose(self, requested or os.environ[IMPLEMENTATION])

        monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", chosen)
        register()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)

    globals().update(_tests())
elif __name__ == "__main__":
    raise SystemExit(main())
