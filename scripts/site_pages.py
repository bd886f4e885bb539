"""Hooks of mkdocs (mkdocs.yml): pages of the site that are not in docs/, and links that hold in the site.

Files of the root become pages as they are. The commands' page and the table of GPUs are generated from the code.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymoe.explanation.models import ModelOnGpu

ROOT = Path(__file__).parents[1]

COMMON_GPUS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200", "b200")
CONTEXT = 8192

ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples.md",
}
"""Files outside of docs/ that are pages of the site, by their paths in the repository."""


def commands_page() -> str:
    """Every command with its options, in the words of its ``--help``."""
    from typer.main import get_command

    from polymoe.cli import app

    text = "# Commands and options\n\nEvery command's `--help`. [What all commands share](../command-line.md).\n"
    return text + "".join(_command(get_command(app), "polymoe", None))


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent)
    if not hasattr(command, "commands"):
        yield f"\n## {context.command_path}\n\n{_paragraphs(command.help)}\n\n"
        yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```\n\n"
        records = (parameter.get_help_record(context) for parameter in command.get_params(context))
        yield from _table(("option", ""), ((_code(names), help) for names, help in filter(None, records)))
        if examples := re.findall(r"^ *(\$ .*)$", command.epilog or "", re.MULTILINE):
            yield "\n```console\n" + "\n".join(examples) + "\n```\n"
        return
    for key, inner in command.commands.items():
        yield from _command(inner, key, context)


def _paragraphs(help: str | None) -> str:
    return _escaped((help or "").replace("\b\n", "").strip())


def _escaped(text: str) -> str:
    """Plain text as Markdown, in which it means nothing else."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


def _code(text: str) -> str:
    """Plain text as code in a table. In backticks a bar would either end the cell or keep its backslash."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _table(head: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for first, *rest in rows:
        cells = (first, *(_escaped(" ".join(cell.split())) for cell in rest))
        yield f"| {' | '.join(cells)} |\n"


def gpus_page() -> str:
    """The GPUs that ``--device`` knows, with sizes and rates."""
    from polymoe.machine import DEVICES

    text = (
        "# Models and GPUs\n\n"
        "- [Families, formats and dialects](../README.md#models-and-formats) that polymoe reads.\n"
        "- [What fits which GPU](#what-fits), of the models whose sizes ship with polymoe.\n"
        "- [What was timed, tested and never tested](../README.md#gpus) on which GPU.\n"
        "- [What each backend accepts](backends.md), by format and GPU.\n\n"
        "## Devices\n\n"
        "`--device` and `device=` take these names, a GPU's name as its maker writes it, or an architecture such as "
        "`sm_90`. The GPU need not be present. Rates are those that predictions use, from data sheets, or measured "
        f"({', '.join(f'`{name}`' for name, d in DEVICES.items() if d.rates == 'measured')}).\n\n"
    )
    rows = (
        (
            f"`{d.name}`",
            d.arch.replace("_", ""),
            str(d.sms),
            f"{d.memory_bytes / 2**30:.1f}",
            f"{d.bandwidth / 1e12:.2f}",
            f"{d.flops_16bit / 1e12:.0f}",
            f"{d.flops_fp8 / 1e12:.0f}" if d.flops_fp8 else "",
        )
        for d in DEVICES.values()
        if d.kind == "cuda"
    )
    head = ("device", "architecture", "SMs", "GiB", "TB/s", "TFLOP/s, 16 bit", "TFLOP/s, FP8")
    return text + "".join(_table(head, rows)) + "".join(_what_fits())


def _what_fits() -> Iterator[str]:
    """Every known model on common GPUs, as ``polymoe models`` says it."""
    from polymoe.common.units import format_bytes
    from polymoe.explanation.models import models

    yield (
        f"\n## What fits\n\nTokens per second of one request, at most, where one GPU holds a model with {CONTEXT:,} "
        "tokens of context; otherwise the number of GPUs that hold its weights. Predicted, or measured where a table "
        "has the layer: `polymoe models --device GPU` says how far the kernels are proven there.\n\n"
    )
    found = {gpu: {one.name: one for one in models(gpu, CONTEXT)} for gpu in COMMON_GPUS}

    def cell(one: ModelOnGpu) -> str:
        if not one.fits:
            return f"{one.gpus} GPUs" if (one.gpus or 0) > 1 else "less context" if one.gpus else "over 64 GPUs"
        return "fits" if one.tokens_per_second is None else f"{one.tokens_per_second:.0f}"

    rows = (
        (
            _code(name),
            one.format,
            format_bytes(one.explanation.weight_bytes),
            *(cell(found[gpu][name]) for gpu in COMMON_GPUS),
        )
        for name, one in sorted(found[COMMON_GPUS[0]].items(), key=lambda item: item[0].lower())
    )
    yield from _table(("model", "experts", "weights", *COMMON_GPUS), rows)


GENERATED: dict[str, Callable[[], str]] = {"reference/commands.md": commands_page, "models-and-gpus.md": gpus_page}
"""Pages that are written from the code."""


def linked(text: str, page: str, repository: str = "") -> str:
    """A page's Markdown with links that hold in the site.

    Args:
        text: Markdown whose links are those of the repository.
        page: of the site, such as ``"performance/cuda.md"``.
        repository: its address; without it, a link to a file that is not in the site becomes the file's path.
    """
    sources = {there: here for here, there in ROOT_PAGES.items()}
    source = sources.get(page, f"docs/{page}")

    def replaced(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = ROOT_PAGES.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if there is not None:
            return f"[{label}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{hash_}{anchor})"
        if repository:
            return f"[{label}]({repository.rstrip('/')}/tree/main/{found})"
        name = label.strip("`")
        return f"`{found}`" if name in found else f"{label} (`{found}`)"

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [re.sub(r"\[([^\[\]]*)\]\(([^)\s]+)\)", replaced, part) for part in parts[::2]]
    return "".join(parts)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, write in GENERATED.items():
        files.append(File.generated(config, page, content=write()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Correct the links of a page."""
    return linked(markdown, page.file.src_uri, config.repo_url or "")
