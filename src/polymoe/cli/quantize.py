"""``polymoe quantize``: a checkpoint with its experts in another format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, ExpertsFormat, OnDevice, Options, Output, option
from polymoe.cli.output import measured_on, print_json, print_table, say
from polymoe.errors import PolymoeError

if TYPE_CHECKING:
    from polymoe.checkpoint.calibration import Calibration, Texts
    from polymoe.checkpoint.layer import StoredLayer


class _Written(Options, heading="What is written"):
    format: ExpertsFormat = option(..., "Format of the experts.", show_default=False)
    out: Path = option(..., "The directory to create.", show_default=False)
    dialect: Literal["compressed-tensors", "modelopt", "gpt-oss", "deepseek"] | None = option(
        None, "How tensors are named and described. Default: as most engines read this format."
    )
    calibrate: Path | None = option(
        None, "JSON lines with text, or prompt and answer: one pass of the model over them weighs errors by column."
    )


def command(checkpoint: CheckpointName, written: _Written, place: OnDevice, output: Output) -> None:
    """Write a checkpoint with its experts in another format. All other tensors and files are copied unchanged.

    A run that was killed continues. report.json in the new directory has the error of each layer and projection.
    """
    require_name(checkpoint)
    from polymoe.checkpoint.calibration import Texts
    from polymoe.checkpoint.quantize import quantize_checkpoint

    device = measured_on(place.device)[1]
    texts = Texts.read(written.calibrate) if written.calibrate else None

    def calibrate(texts: Texts) -> Calibration:
        from polymoe.engines.transformers.calibrate import calibrate

        return calibrate(checkpoint, texts, device=device, progress=say)

    try:
        report = quantize_checkpoint(
            checkpoint, written.format, written.out, dialect=written.dialect, progress=say,
            calibrate=partial(calibrate, texts) if texts else None, begin=_say_readers,
        )  # fmt: skip
    except (OSError, KeyboardInterrupt) as error:
        if not isinstance(error, PolymoeError):  # as of a checkpoint that was not found: there is nothing to continue
            say("not finished; the same command continues with what is complete")
        raise
    if output.json:
        print_json(report)
        return
    rows = [
        (
            f"{row['layer']}, group {row['group']}" if row["group"] else row["layer"], part, _error(found, "error"),
            found["worst_expert"], _error(found, "worst_error"), _error(found, "weighted_error"),
        )
        for row in report["layers"]
        for part, found in row.items()
        if isinstance(found, dict)
    ]  # fmt: skip
    columns = ("layer", "projection", "relative error", "worst expert", "its error", "weighted error")
    print_table(columns, rows, f"{written.out}: {report['format']}, {report['dialect']}")
    if texts := report.get("calibration"):
        without = sum(row["experts_without_tokens"] for row in report["layers"])
        say(f"{texts['tokens']} tokens in {texts['texts']} texts; {without} experts were given too few of them")


def _say_readers(layers: Sequence[StoredLayer], stacked: bool) -> None:
    from polymoe.engines.readers import readers

    for sentence in readers(layers, stacked=stacked):
        say(sentence)


def _error(found: dict[str, float], name: str) -> str | None:
    return f"{found[name]:.4f}" if name in found else None
