"""Options of the command line: each is declared once, as a field of a group that commands share.

A group is a frozen dataclass; the first line of its docstring is its heading in the help. A command's function takes
groups like any other argument::

    def command(checkpoint: CheckpointName, placement: Placement, output: Output) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from polymoe.common.atomic import require_new_file
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from polymoe.bench.cases import Workload


def option(
    default: Any,
    help: str,
    *names: str,
    parse: Callable[[str, str], Any] | None = None,
    complete: Callable[[str], Sequence[str]] | None = None,
    **more: Any,
) -> Any:
    """A field of a group.

    Args:
        default: its value without the option; of an option with ``parse``, text.
        help: a sentence; with what None stands for.
        names: by default the field's name; more than one, or another one.
        parse: makes the option's text and its name a value.
        complete: what a shell offers for the beginning of a value.
        more: keywords of :func:`typer.Option`, such as ``min``.
    """
    declared = typer.Option(default, *names, help=help, autocompletion=complete, **more)
    name = names[0] if names else ""
    value = default if parse is None or default is None else parse(default, name)
    return field(default=value, metadata={"option": declared, "parse": parse})


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of its groups as parameters, which Typer makes options of."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group: Any = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        types = get_type_hints(group)
        for of in fields(group):
            declared = copy(of.metadata["option"])
            declared.rich_help_panel = group.__doc__.partition("\n")[0].rstrip(".")
            kind = types[of.name] if of.metadata["parse"] is None else str | None
            parameters.append(inspect.Parameter(of.name, parameter.KEYWORD_ONLY, default=declared, annotation=kind))

    @functools.wraps(function)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{of.name: _parsed(of, given.pop(of.name)) for of in fields(group)})
        function(**given)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    called.__dict__["__signature__"] = inspect.Signature(parameters)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parsed(of: Any, given: Any) -> Any:
    names = of.metadata["option"].param_decls
    parse = of.metadata["parse"]
    return given if parse is None or given is None else parse(given, names[0] if names else _dashed(of.name))


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def listed(text: str, option: str) -> tuple[str, ...]:
    """Parse names of an option that are separated by commas: ``"cuda, triton"``. Each counts once.

    Raises:
        ArgumentError: for an empty list or name.
    """
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ArgumentError(option, expected="names separated by commas", got=repr(text))
    return tuple(dict.fromkeys(names))


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse an option that is a JSON object.

    Raises:
        ArgumentError: for anything else.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentError(option, expected="a JSON object", got=repr(text))
    return value


def file_to_write(text: str, option: str) -> Path:
    """Parse the path of a file that will be written, after minutes perhaps.

    Raises:
        ArgumentError: if its directory does not exist.
    """
    if not Path(text).parent.is_dir():
        raise ArgumentError(option, expected="a file in an existing directory", got=repr(text))
    return Path(text)


def numbers(least: float, most: float, kind: type[Any] = int) -> Callable[[str, str], tuple[Any, ...]]:
    """What parses numbers of an option that are separated by commas: ``"1,16,256"``.

    Raises:
        ArgumentError: by what is returned, for anything but numbers from ``least`` to ``most``.
    """

    def parse(text: str, option: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part) for part in text.split(","))
        except ValueError:
            found = ()
        if not found or not all(least <= number <= most for number in found):
            expected = f"numbers such as 1,4,16, from {least:.10g} to {most:.10g}"
            raise ArgumentError(option, expected=expected, got=repr(text))
        return found

    return parse


token_counts = numbers(1, 2**20)
"""Parses numbers of tokens, or of sequences."""


def _one_process(tp: int) -> int:
    """Refuse ``--tp`` above 1, and say what runs a model on several GPUs.

    Raises:
        ArgumentError: for more than one rank.
    """
    if tp > 1:
        raise ArgumentError(
            "--tp",
            expected="1, since this command is one process",
            got=str(tp),
            hint=f"--device-map auto distributes whole layers over the GPUs; for tensor parallelism, "
            f"vllm serve MODEL --tensor-parallel-size {tp} runs polymoe's experts, with polymoe installed next to vLLM",
        )
    return tp


DEMO = "demo"


def backend_names(begun: str) -> list[str]:
    """Names of backends for completion; the last of several."""
    from polymoe.backends import BACKENDS

    before, comma, last = begun.rpartition(",")
    return [f"{before}{comma}{name}" for name in ("auto", *BACKENDS) if name.startswith(last)]


def models(begun: str) -> list[str]:
    """Ids of known models, and directories, for completion."""
    from polymoe.checkpoint.known_models import known_models

    below = sorted(Path().glob(f"{begun}*")) if begun[:1] not in ("", "/", "~") else []
    return [name for name in known_models() if name.startswith(begun)] + [f"{at}/" for at in below if at.is_dir()]


def gpus(begun: str) -> list[str]:
    """Names of GPUs for completion: those that ``explain`` knows."""
    from polymoe.machine import DEVICES

    return [name for name in DEVICES if name.startswith(begun)]


def _devices(begun: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:1") if name.startswith(begun)]


def _computing_device(name: str, option: str) -> str:
    """Parse where something runs, before the imports that take seconds.

    Raises:
        ArgumentError: for anything but this machine's devices.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        hint = "names of GPUs such as rtx4090 are for explain and models, which run nothing"
        raise ArgumentError(option, expected="auto, cpu, cuda or cuda:N", got=repr(name), hint=hint)
    return name


def checkpoint_argument(help: str) -> Any:
    """The argument of commands that read a checkpoint or its config."""
    return typer.Argument(
        metavar="CHECKPOINT", help=f"{help} demo: the one of polymoe.", show_default=False, autocompletion=models,
        callback=_checkpoint_path,
    )  # fmt: skip


def _checkpoint_path(name: str) -> str:
    """Return what a user names, but for ``demo`` the path of the checkpoint that comes with polymoe: a small one that
    was trained to add. A file or directory of that name goes first."""
    if name != DEMO or Path(DEMO).exists():
        return name
    packaged, of_clone = Path(__file__).parents[1] / DEMO, Path(__file__).parents[3] / "models" / "sums-gpt-oss-mxfp4"
    return str(packaged if packaged.is_dir() else of_clone)


def require_checkpoint(name: str) -> None:
    """Check that a name can be a checkpoint's, before the imports that take seconds.

    Raises:
        CheckpointNotFound: if it is neither an existing path nor like a Hub id.
    """
    from polymoe.checkpoint.hub import require_name

    require_name(name)


CheckpointName = Annotated[str, checkpoint_argument("Directory of a checkpoint, or a Hub id.")]
"""The argument of commands that read weights."""
RoleName = Literal["mixed", "decode", "prefill"]
"""Workers that prefill, decode or do both."""
CaseName = Literal[
    "deepseek-v3", "deepseek-v3-ep32", "deepseek-v3-ep320", "deepseek-v3-ep72", "deepseek-v3-ep8", "deepseek-v3-tp8",
    "deepseek-v4-flash", "glm-4.7", "gpt-oss-120b", "gpt-oss-20b", "kimi-k2", "kimi-k2-tp8", "mixtral-8x7b",
    "nemotron-3-super", "qwen3-235b", "qwen3-235b-tp4-bf16",
]  # fmt: skip
"""Cases: the command line names them without importing torch; a test compares them with the table."""
FormatName = Literal[
    "bf16", "fp16", "fp8_tensor", "fp8_channel", "fp8_block128", "mxfp8", "mxfp4", "nvfp4", "int4_g32", "int4_g128"
]
"""Formats of weights."""
ActivationsName = Literal[
    "16bit", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "fp8_static", "mxfp8", "nvfp4",
    "fp8_token_fast_accumulation", "fp8_static_fast_accumulation",
]  # fmt: skip
"""How the experts' inputs are quantized."""


ExpertsFormat = Literal["mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128", "mxfp8"]
"""Formats that experts can be quantized to."""


@dataclass(frozen=True)
class Output:
    """Output."""

    json: bool = option(False, "Print one JSON object on stdout.", "--json")


@dataclass(frozen=True)
class OnDevice:
    """Device and backend."""

    device: str = option(
        "auto", "cpu, cuda, cuda:1, or auto: the GPU if there is one.", complete=_devices, parse=_computing_device
    )


@dataclass(frozen=True)
class OneBackend:
    """Device and backend."""

    backend: str = option(
        "auto", "Backend for the experts: auto, or a name such as cuda or triton.", complete=backend_names
    )


@dataclass(frozen=True)
class Planned(OneBackend):
    """Device and backend."""

    role: RoleName = option(
        "mixed", "Token counts to plan for: decode (1 to 256), prefill (from 1024) or mixed (both)."
    )


@dataclass(frozen=True)
class Computing(OnDevice, Planned):
    """Device and backend."""


@dataclass(frozen=True)
class QuantizedExperts:
    """Device and backend."""

    experts: ExpertsFormat | None = option(
        None, "Quantize experts in 16 bits to this format while loading. Default: they stay as stored."
    )


@dataclass(frozen=True)
class Placement(QuantizedExperts, Computing):
    """Device and backend."""

    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = option(
        None, "Distribute whole layers over all GPUs, like Transformers' device_map; replaces --device."
    )
    expert_memory: str | None = option(
        None, "GPU memory for experts: auto, 16GiB, or 32slots in each layer; all experts lie in host memory then. "
        "Default: all experts lie on the GPU.",
    )  # fmt: skip
    tp: int = option(
        1, "Must be 1: this command is a single process. For more, see the error.",
        "--tp", "--tensor-parallel-size", min=1, callback=_one_process,
    )  # fmt: skip

    @property
    def load(self) -> dict[str, Any]:
        """Keywords of what loads a model."""
        return {name: value for name, value in vars(self).items() if name != "tp"}


@dataclass(frozen=True)
class Sampling:
    """Answers."""

    max_tokens: int | None = option(
        None, "Maximum number of tokens in a reply. Default: what fits into the context.",
        "--max-tokens", "--max-new-tokens", min=1,
    )  # fmt: skip
    temperature: float | None = option(
        None, "Sampling temperature where a request names none; 0 is greedy. Default: the checkpoint's.",
        min=0, max=100,
    )  # fmt: skip


@dataclass(frozen=True)
class ServerAccess:
    """Server."""

    server: str = option(
        ..., "The server's URL, such as http://127.0.0.1:8000, with or without /v1.", "--server", "--base-url",
        show_default=False,
    )  # fmt: skip
    model: str | None = option(None, "The model's name on the server. Default: its only model.")
    api_key: str | None = option(
        None, "The server's key, a bearer token.", envvar=["POLYMOE_API_KEY", "OPENAI_API_KEY"], show_default=False
    )


@dataclass(frozen=True)
class Invariance:
    """Device and backend."""

    batch_invariant: bool = option(
        False, "Results must be bitwise independent of the rest of the batch.", "--batch-invariant"
    )


@dataclass(frozen=True)
class MeasuredLayer(Invariance):
    """What is measured."""

    case: CaseName | None = option(None, "Expert layer of a known model, with random weights.")
    checkpoint: str | None = option(
        None,
        "Real weights instead of a case: a directory, a Hub id or demo.",
        complete=models,
        parse=lambda name, _: _checkpoint_path(name),
    )
    layer: int | None = option(None, "Layer of the checkpoint. Default: the first one with experts.")
    format: FormatName | None = option(None, "Weight format of a case. Default: its own.")
    activations: ActivationsName | None = option(
        None, "How the experts' inputs are quantized. Default: E4M3 for FP8 weights, else 16bit."
    )

    def check(
        self, of_case: Mapping[str, Any] = MappingProxyType({}), of_files: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Check that there is either a case or a checkpoint, and no option of the other.

        Args:
            of_case, of_files: further options of either, by name; None if not given.

        Raises:
            BadParameter: otherwise.
        """
        if (self.case is None) == (self.checkpoint is None):
            raise typer.BadParameter("give either --case or --checkpoint")
        needed = "--checkpoint" if self.case is not None else "--case"
        others = {"layer": self.layer, **of_files} if self.case is not None else {"format": self.format, **of_case}
        if given := [name for name, value in others.items() if value is not None]:
            raise typer.BadParameter(f"{_dashed(given[0])} needs {needed}")

    def workload(
        self, device: torch.device, changes: Mapping[str, Any] = MappingProxyType({}), **ranks: int | None
    ) -> Workload:
        """Return what is measured.

        Args:
            device: where its weights are.
            changes: sizes and bias instead of the case's.
            ranks: sizes of parallel groups, None for 1.
        """
        from polymoe.bench.cases import Workload, case_named
        from polymoe.checkpoint import Checkpoint

        if self.case is not None:
            case = case_named(self.case).changed(**changes)
            found = Workload.of_case(case, device, self.format, self.activations)
        else:
            opened = Checkpoint.open(self.checkpoint or "")
            sizes = {name: size or 1 for name, size in ranks.items()}
            found = Workload.of_checkpoint(opened, self.layer, device, self.activations, **sizes)
        return found.batch_invariant() if self.batch_invariant else found


@dataclass(frozen=True)
class RecordOutput(Output):
    """Output."""

    out: Path | None = option(None, "Append each record to this file as one JSON line.")
    commit: str | None = option(None, "Commit for the records, if git does not know it.")

    def appender(self) -> Callable[[Any], None]:
        """What appends a record to the file, if one is named.

        Raises:
            ArgumentError: if it cannot be written.
        """
        from polymoe.bench.records import append, check_writable

        if self.out is None:
            return lambda record: None
        check_writable(self.out)
        return functools.partial(append, self.out)


@dataclass(frozen=True)
class RecordedRouting:
    """Output."""

    record_routing: Path | None = option(
        None, "Write the expert ids of every call to this new file, for bench slots. Each call waits for its ids.",
        "--record-routing", parse=require_new_file,
    )  # fmt: skip
