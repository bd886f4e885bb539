"""Groups and commands of the command line: ``-h``, old forms of commands, examples, errors in the words of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.completion import install_callback, show_callback
from typer.core import TyperCommand, TyperGroup

from polymoe.cli.options import flat
from polymoe.cli.output import drop_output, say
from polymoe.errors import ArgumentError, CheckpointNotFound, PolymoeError, nearest

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

_COMPLETION = {"--show-completion": show_callback, "--install-completion": install_callback}
"""Typer's own take no shell's name, and find out which one runs; where none does, they need one."""

_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")

_LONG = 40
"""Choices of more characters stand in the text of the help: beside the option they would not fit into 80 columns."""


class Command(TyperCommand):
    """A command whose errors name options where the library names arguments, and the nearest choice."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, under the headings of their groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                heading = getattr(param, "rich_help_panel", None) or f"{param.param_type_name.capitalize()}s"
                sections.setdefault(heading, []).append(_in_few_words(record, str(param.name)))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; the error for a wrong choice names the nearest one."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if found := re.search(r"('.*') is not one of (.*)\.", error.message):
                known = re.findall(r"'([^']*)'", found[2])
                error.message = f"{found[1]}: {nearest(found[1].strip(chr(39)), known)}"
            raise

    def invoke(self, ctx: Any) -> Any:
        """Call the function; its errors are in the words of the command line."""
        try:
            return super().invoke(ctx)
        except PolymoeError as error:
            layer = ctx.params.get("layer")
            if isinstance(error, CheckpointNotFound) and layer is not None and error.where == f"layer {layer}":
                raise ArgumentError("--layer", expected=error.expected, got=f"{layer}, {error.got}") from error
            options = {str(p.name): p.opts[0] for p in self.params if p.opts[0].startswith("--")}
            error.where = in_options(error.where, options)
            error.hint = error.hint and in_options(error.hint, options)
            raise
        # Typer would end with status 1 at the first, and without a word at the second.
        except BrokenPipeError:  # whoever reads stdout has enough, as `| head`
            drop_output()
            raise typer.Exit from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(130) from None


class Group(TyperGroup):
    """A group that may have a default command, for forms without its name: ``polymoe bench --case C`` is
    ``bench kernels``."""

    default: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command where no command is named, and take a shell's name after the options of
        completion."""
        first = args[0] if args else None
        if first in _COMPLETION and args[1:] and not args[1].startswith("-"):
            if args[1] not in _SHELLS:  # Typer would take the shell that runs
                raise ArgumentError(first, got=repr(args[1]), hint=nearest(args[1], _SHELLS))
            _COMPLETION[first](ctx, self.params[0], args[1])
        option_first = first is not None and first.startswith("-") and first not in ctx.help_option_names
        if self.default is not None and option_first:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def group(name: str, help: str, *, cls: type[Group] = Group, **options: Any) -> typer.Typer:
    """A group of commands. Help is plain text, in which no name is shortened, whatever the width."""
    return typer.Typer(
        name=name,
        cls=cls,
        help=help,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings=_CONTEXT,
        pretty_exceptions_enable=False,
        **options,
    )


def _in_few_words(record: tuple[str, str], name: str) -> tuple[str, str]:
    """An option and its help, from Typer's: ``<int range>`` is ``<int>``, and long choices follow the text.

    >>> _in_few_words(("--role <mixed|decode|prefill>", "Token counts."), "role")
    ('--role <mixed|decode|prefill>', 'Token counts.')
    >>> _in_few_words(("--case <deepseek-v3|deepseek-v4-flash|gpt-oss-120b>", "A layer."), "case")
    ('--case <case>', 'A layer. One of: deepseek-v3, deepseek-v4-flash, gpt-oss-120b.')
    """
    option, text = record[0].replace(" range>", ">"), record[1]
    if (found := re.search(r"[<\[]([^<\[]*\|.*)[>\]]$", option)) and len(found[1]) > _LONG:
        option = f"{option[: found.start()]}<{name}>"
        said, bracket, more = text.partition("  [")  # the default
        text = f"{said} One of: {found[1].replace('|', ', ')}.{bracket}{more}"
    return option, text


def add(to: typer.Typer, name: str, short: str, function: Callable[..., Any], *examples: str) -> None:
    """Add a command to a group: ``short`` fits beside its name into 80 columns of the list of commands, and the
    function's docstring is its help, with the examples, which are command lines."""
    epilog = "\n".join(("\b", "Examples:", *(f"  $ {example}" for example in examples)))
    to.command(name, cls=Command, short_help=short, epilog=epilog, context_settings=_CONTEXT)(flat(function))


_VALUE = r"""("[^"]*"|'[^']*'|\.\.\.|[\w:.-]*\w)"""


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Where an error is, or a hint, with options instead of the library's arguments, by whose names they are given.

    >>> in_options('graphs needs a GPU; device="cuda:1"', {"device": "--device"})
    'graphs needs a GPU; --device cuda:1'
    >>> in_options("load(device_map=...)", {"device_map": "--device-map"})
    '--device-map'
    """
    name, colon, rest = text.partition(":")
    if name in options:
        return f"{options[name]}{colon}{rest}"
    if (call := re.fullmatch(r"\w+\((\w+)=\.\.\.\)", text)) and call[1] in options:
        return options[call[1]]

    def replaced(match: re.Match[str]) -> str:
        value = match[2].strip("\"'")
        if match[1] not in options:
            return match[0]
        return options[match[1]] if value == "True" else f"{options[match[1]]} {value}"

    return re.sub(rf"\b(\w+)={_VALUE}", replaced, text)
