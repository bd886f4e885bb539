"""What runs which layers, in prometheus_client's registry and in the files that an engine's server reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polymoe.machine import Machine
from polymoe.planning.select import select
from support.problems import problem_of, random_experts

prometheus_client = pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[3]
WORKER = """
import sys
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
assert "prometheus_client" not in sys.modules
from polymoe.engines.serving.layer_metrics import LayerMetrics
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.problem.verdict import Reason
from support.problems import problem_of, random_experts

metrics, selection = LayerMetrics("vLLM"), select(problem_of(random_experts("mxfp4")), Machine.of("cpu"))
for where in ("layers.0", "layers.1", "layers.1"):
    metrics.packed(where, selection)
LayerLog("vLLM", "vllm.polymoe", EngineSettings(), ()).stand_aside("layers.2", (Reason("LoRA", "none", "some"),), False)
"""


def test_another_process_reads_them(tmp_path: Path) -> None:
    """As vLLM and SGLang do: the worker writes files, and the server's process collects them."""
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    }
    subprocess.run([sys.executable, "-c", WORKER], env=environment, check=True)
    registry = prometheus_client.CollectorRegistry()
    from prometheus_client.multiprocess import MultiProcessCollector

    MultiProcessCollector(registry, path=str(tmp_path))
    text = re.sub(r'pid="\d+"', 'pid="1"', prometheus_client.generate_latest(registry).decode())
    plan = select(problem_of(random_experts("mxfp4")), Machine.of("cpu")).require()
    labels = f'backend="{plan.steps[0].backend}",engine="vLLM",format="mxfp4",layout="{plan.layout}",pid="1"'
    assert f"polymoe_layers{{{labels}}} 2.0" in text
    assert 'polymoe_layers_left{engine="vLLM",pid="1",reason="LoRA"} 1.0' in text


def test_a_name_that_is_taken_stops_no_engine() -> None:
    """By a second copy of the module, for example: what is not counted is no reason to fail."""
    from polymoe.engines.serving import layer_metrics

    prometheus_client.Gauge("polymoe_taken", "Somebody else's.", ("a",))
    assert layer_metrics._gauge("polymoe_taken", "Ours.", ("a",)) is None


def test_without_prometheus_client_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from polymoe.engines.serving import layer_metrics

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(layer_metrics, "_gauge", layer_metrics._gauge.__wrapped__)
    metrics = layer_metrics.LayerMetrics("SGLang")
    metrics.packed("layers.0", select(problem_of(random_experts("mxfp4")), Machine.of("cpu")))


@pytest.mark.parametrize("name", ["serve", "engine"])
def test_dashboards_ask_for_metrics_that_exist(name: str) -> None:
    dashboard = json.loads((ROOT / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    asked = {n for panel in dashboard["panels"] for target in panel["targets"] for n in METRIC.findall(target["expr"])}
    source = "src/polymoe/serve/metrics.py" if name == "serve" else "src/polymoe/engines/serving/layer_metrics.py"
    known = set(re.findall(r'"(polymoe_\w+)"', (ROOT / source).read_text(encoding="utf-8")))
    assert {re.sub(r"_(total|bucket)$", "", metric) for metric in asked} == known - NOT_SHOWN
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


METRIC = re.compile(r"polymoe_\w+")
NOT_SHOWN = {"polymoe_request_seconds"}
