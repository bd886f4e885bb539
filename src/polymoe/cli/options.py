"""Options of the command line: each is declared once, as a field of a group that commands share.

A command's function takes groups like any other argument::

    def command(checkpoint: CheckpointName, placement: Placement, output: Output) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer

from polymoe.common.atomic import require_new_file
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from polymoe.bench.cases import Workload


class Options:
    """A group of options. Each subclass is a frozen dataclass; its heading in the help is inherited."""

    heading: ClassVar[str]

    def __init_subclass__(cls, heading: str | None = None) -> None:
        if heading is not None:
            cls.heading = heading
        dataclass(frozen=True)(cls)


def option(
    default: Any,
    help: str,
    *names: str,
    parse: Callable[[str, str], Any] | None = None,
    complete: Callable[..., Sequence[str]] | None = None,
    **more: Any,
) -> Any:
    """A field of a group.

    Args:
        default: its value without the option; of an option with ``parse``, text.
        help: a sentence; with what None stands for.
        names: by default the field's name.
        parse: makes the option's text and its name a value, or raises ArgumentError.
        complete: what a shell offers.
        more: keywords of :func:`typer.Option`, such as ``min``.
    """

    def parsed(param: typer.CallbackParam, text: str | None) -> Any:
        return text if text is None or parse is None else parse(text, param.opts[0])

    if parse is not None:
        more["callback"] = parsed
    declared = typer.Option(default, *names, help=help, autocompletion=complete, **more)
    return field(default=default, metadata={"option": declared, "text": parse is not None})


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of its groups as parameters, which Typer makes options of."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{of.name: given.pop(of.name) for of in fields(group)})
        function(**given)

    called.__dict__["__signature__"] = inspect.Signature(parameters)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group)
    for of in fields(group):
        declared = copy(of.metadata["option"])
        declared.rich_help_panel = group.heading
        if of.default is False and not declared.param_decls:
            declared.param_decls = (_dashed(of.name),)  # without the --no- form
        kind = str | None if of.metadata["text"] else types[of.name]
        yield inspect.Parameter(of.name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=kind)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def listed(text: str, option: str) -> tuple[str, ...]:
    """Parse names that are separated by commas: ``"cuda, triton"``. Each counts once."""
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ArgumentError(option, expected="names separated by commas", got=repr(text))
    return tuple(dict.fromkeys(names))


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentError(option, expected="a JSON object", got=repr(text))
    return value


def file_to_write(text: str, option: str) -> Path:
    """Parse the path of a file that will be written, after minutes perhaps."""
    if not Path(text).parent.is_dir():
        raise ArgumentError(option, expected="a file in an existing directory", got=repr(text))
    return Path(text)


def numbers(least: int, most: int) -> Callable[[str, str], tuple[int, ...]]:
    """What parses numbers that are separated by commas: ``"1,16,256"``."""

    def parse(text: str, option: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in text.split(","))
        except ValueError:
            found = ()
        if not found or not all(least <= number <= most for number in found):
            expected = f"numbers such as 1,4,16, from {least} to {most}"
            raise ArgumentError(option, expected=expected, got=repr(text))
        return found

    return parse


token_counts = numbers(1, 2**20)
"""Parses numbers of tokens, or of sequences."""


def _one_process(tp: int) -> int:
    if tp > 1:
        raise ArgumentError(
            "--tp",
            expected="1, since this command is one process",
            got=str(tp),
            hint=f"--device-map auto distributes whole layers over the GPUs; for tensor parallelism, "
            f"vllm serve MODEL --tensor-parallel-size {tp} runs polymoe's experts, with polymoe installed next to vLLM",
        )
    return tp


def backend_names(incomplete: str) -> list[str]:
    """Names of backends for completion; the last of several."""
    from polymoe.backends import BACKENDS

    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in ("auto", *BACKENDS)]


def models(incomplete: str) -> list[str]:
    """Ids of known models, and directories, for completion."""
    from polymoe.checkpoint.known_models import known_models

    below = sorted(Path().glob(f"{incomplete}*")) if incomplete[:1] not in ("", "/", "~") else []
    return [*known_models(), *(f"{path}/" for path in below if path.is_dir())]


def gpus() -> list[str]:
    """Names of GPUs for completion: those that ``explain`` knows."""
    from polymoe.machine import DEVICES

    return list(DEVICES)


def _computing_device(name: str, option: str) -> str:
    """Parse where something runs, before the imports that take seconds."""
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
    if name != "demo" or Path(name).exists():
        return name
    packaged, of_clone = Path(__file__).parents[1] / name, Path(__file__).parents[3] / "models" / "sums-gpt-oss-mxfp4"
    return str(packaged if packaged.is_dir() else of_clone)


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


class Output(Options, heading="Output"):
    json: bool = option(False, "Print the result as JSON on stdout.")


class OnDevice(Options, heading="Device and backend"):
    device: str = option(
        "auto", "cpu, cuda, cuda:1, or auto: the GPU if there is one.", parse=_computing_device,
        complete=lambda: ["auto", "cpu", "cuda", "cuda:0", "cuda:1"],
    )  # fmt: skip


class OneBackend(Options, heading="Device and backend"):
    backend: str = option(
        "auto", "Backend for the experts: auto, or a name such as cuda or triton.", complete=backend_names
    )


class Planned(OneBackend):
    role: RoleName = option(
        "mixed", "Token counts to plan for: decode (1 to 256), prefill (from 1024) or mixed (both)."
    )


class QuantizedExperts(Options, heading="Device and backend"):
    experts: ExpertsFormat | None = option(
        None, "Quantize experts in 16 bits to this format while loading. Default: they stay as stored."
    )


class Computing(QuantizedExperts, OnDevice, Planned):
    pass


class Placement(Computing):
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


class Sampling(Options, heading="Answers"):
    max_tokens: int | None = option(
        None, "Maximum number of tokens in a reply. Default: what fits into the context.",
        "--max-tokens", "--max-new-tokens", min=1,
    )  # fmt: skip
    temperature: float | None = option(
        None, "Sampling temperature where a request names none; 0 is greedy. Default: the checkpoint's.",
        min=0, max=100,
    )  # fmt: skip


class Invariance(Options, heading="Device and backend"):
    batch_invariant: bool = option(False, "Results must be bitwise independent of the rest of the batch.")


class MeasuredLayer(Invariance, heading="What is measured"):
    case: CaseName | None = option(None, "Expert layer of a known model, with random weights.")
    checkpoint: str | None = option(
        None, "Real weights instead of a case: a directory, a Hub id or demo.", complete=models,
        parse=lambda name, _: _checkpoint_path(name),
    )  # fmt: skip
    layer: int | None = option(None, "Layer of the checkpoint. Default: the first one with experts.")
    format: FormatName | None = option(None, "Weight format of a case. Default: its own.")
    activations: ActivationsName | None = option(
        None, "How the experts' inputs are quantized. Default: E4M3 for FP8 weights, else 16bit."
    )

    def check(self, *, of_case: Mapping[str, Any], of_files: Mapping[str, Any]) -> None:
        """Raise BadParameter unless there is either a case or a checkpoint, and no option of the other; ``of_case`` and
        ``of_files`` are further options of either, by name, None if not given."""
        if (self.case is None) == (self.checkpoint is None):
            raise typer.BadParameter("give either --case or --checkpoint")
        needed = "--checkpoint" if self.case is not None else "--case"
        others = {"layer": self.layer, **of_files} if self.case is not None else {"format": self.format, **of_case}
        if given := [name for name, value in others.items() if value is not None]:
            raise typer.BadParameter(f"{_dashed(given[0])} needs {needed}")

    def workload(self, device: torch.device, *, of_case: Mapping[str, Any], of_files: Mapping[str, Any]) -> Workload:
        """Return what is measured, with its weights on ``device``; the options are those of :meth:`check`."""
        from polymoe.bench.cases import Workload, case_named
        from polymoe.checkpoint import Checkpoint

        if self.case is not None:
            found = Workload.of_case(case_named(self.case).changed(**of_case), device, self.format, self.activations)
        else:
            opened = Checkpoint.open(self.checkpoint or "")
            ranks = {name: size or 1 for name, size in of_files.items()}
            found = Workload.of_checkpoint(opened, self.layer, device, self.activations, **ranks)
        return found.batch_invariant() if self.batch_invariant else found


class RecordOutput(Output):
    out: Path | None = option(None, "Append each record to this file as one JSON line.")
    commit: str | None = option(None, "Commit for the records, if git does not know it.")

    def appender(self) -> Callable[[Any], None]:
        """What appends a record to the file, if one is named; raises ArgumentError if it cannot be written."""
        from polymoe.bench.records import append, check_writable

        if self.out is None:
            return lambda record: None
        check_writable(self.out)
        return functools.partial(append, self.out)


class RecordedRouting(Options, heading="Output"):
    record_routing: Path | None = option(
        None, "Write the expert ids of every call to this new file, for bench slots. Each call waits for its ids.",
        parse=require_new_file,
    )  # fmt: skip
