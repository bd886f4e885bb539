"""LayerLog: what a plug-in tells the user about the layers: a line for each kind, from the first rank, and metrics of
every process."""

from __future__ import annotations

import logging
from importlib import metadata

from torch import nn

from polymoe.engines.serving.layer_metrics import LayerMetrics
from polymoe.engines.serving.settings import EngineSettings
from polymoe.errors import UnsupportedProblem
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.packed_layer import PackedLayer
from polymoe.problem.verdict import Reason


class LayerLog:
    """The lines of one process.

    Args:
        logger: below the engine's own loggers, as their handlers take no others.
        choices: reasons by which the user chose the engine: its line is then no warning.
    """

    def __init__(self, engine: str, logger: str, settings: EngineSettings, choices: tuple[str, ...]) -> None:
        self._engine, self._settings = engine, settings
        self._choices = ("POLYMOE_LAYERS", *choices)
        self._log = logging.getLogger(logger)
        self._said: set[str] = set()
        self._metrics = LayerMetrics(engine)

    def lacking(self, version: str, lacking: tuple[str, ...], supported: str) -> None:
        """Say which names the installed engine lacks; with ``POLYMOE=require`` that is an UnsupportedProblem."""
        text = f"{self._engine} {version} lacks {', '.join(lacking)}"
        if self._settings.mode == "require":
            raise UnsupportedProblem(
                f"polymoe in {self._engine}", expected=f"the hooks of {self._engine} {supported}", got=text
            )
        self._log.warning("polymoe %s stands aside for all layers: %s", _version(), text)

    def stand_aside(self, where: str, reasons: tuple[Reason, ...], first_rank: bool) -> None:
        """Say that the engine keeps the layer ``where``, and why; with ``POLYMOE=require`` as an UnsupportedProblem."""
        said = "; ".join(map(str, reasons))
        if self._settings.mode == "require":
            raise UnsupportedProblem(
                where,
                expected="experts that polymoe runs, as POLYMOE=require says",
                got=said,
                hint=f"without POLYMOE=require {self._engine} runs them",
            )
        self._metrics.left(where, reasons)
        if first_rank and self._is_new(said):
            chosen = all(reason.what in self._choices for reason in reasons)
            self._log.log(
                logging.INFO if chosen else logging.WARNING,
                "polymoe %s leaves %s, and all layers like it, to %s: %s",
                _version(),
                where,
                self._engine,
                said,
            )

    def packed(
        self,
        packed: PackedLayer,
        module: nn.Module,
        offloaded: OffloadedExperts | None,
        instead: str,
        first_rank: bool,
    ) -> None:
        """Say what runs the layer that was packed into ``module``, or lies in host memory, and what the engine would
        have taken instead."""
        self._metrics.packed(packed.where, packed.selection)
        summary = packed.selection.summary()
        if first_rank and self._is_new(summary):
            self._log.info(
                "polymoe %s runs %s, and all layers like it: %s. %.1f MiB packed for each layer on this rank; "
                "%s's own choice: %s",
                _version(),
                packed.where,
                summary,
                (packed.nbytes(module) if offloaded is None else offloaded.packed.nbytes) / 2**20,
                self._engine,
                instead,
            )
        if first_rank and offloaded is not None and self._is_new(offloaded.summary()):
            self._log.info("polymoe %s: %s, and all layers like it: %s", _version(), packed.where, offloaded.summary())

    def _is_new(self, text: str) -> bool:
        new = text not in self._said
        self._said.add(text)
        return new


def _version() -> str:
    return metadata.version("polymoe")
