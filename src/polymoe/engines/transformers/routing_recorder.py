"""recorded_routing: write down which experts the routers of a model choose, for ``--record-routing``."""

from __future__ import annotations

import signal
import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polymoe.checkpoint.architectures.interface import first_parameter, has_interface
from polymoe.common.atomic import require_new_file
from polymoe.engines.transformers.contract import checked_call
from polymoe.engines.transformers.experts_interface import capturing
from polymoe.engines.transformers.families import PackedExperts
from polymoe.errors import UnsupportedProblem
from polymoe.layer.routing_trace import RoutingTrace, TracedLayer, number_of_ids


@contextmanager
def recorded_routing(model: nn.Module, path: Path, *, required: bool = True) -> Iterator[None]:
    """Within it, record the expert ids of every call of the model's experts, of padding too, and write them to ``path``
    at the end: a :class:`~polymoe.layer.routing_trace.RoutingTrace`. Until then they are held in memory, 2 bytes each.

    Ctrl-C and SIGTERM end the recording, and the file has what came before; further ones do not end its writing. After
    another error there is no file. SIGTERM raises :class:`SystemExit` with 143. Each call waits until the GPU has
    computed its ids. Calls on several threads are recorded one after the other.

    Raises:
        ArgumentError: if the file exists or cannot be made.
        UnsupportedProblem: for a model without experts that polymoe runs; by a call that a CUDA graph captures, whose
            replays nobody would see; at the end, if no call was seen and ``required``: otherwise there is no file then.
    """
    require_new_file(path, _WHERE)
    recorder = _Recorder(model)
    with _interrupted_once() as interruptions:
        with recorder.hooks:
            try:
                yield
            except (KeyboardInterrupt, SystemExit) as error:
                interruptions.append(error)
            else:
                interruptions.append(None)
        if recorder.seen or (required and interruptions[0] is None):
            recorder.trace().save(path)
    if (error := next(filter(None, interruptions), None)) is not None:
        raise error


@contextmanager
def _interrupted_once() -> Iterator[list[BaseException | None]]:
    """Ctrl-C and SIGTERM raise while the list is empty; then they are appended."""
    came: list[BaseException | None] = []

    def interrupt(number: int, _: object) -> None:
        error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        if not came:
            raise error
        came.append(error)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield came
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Recorder:
    """Hooks on the experts of a model, until :attr:`hooks` is closed."""

    def __init__(self, model: Any) -> None:
        self._model, self._lock = model, threading.Lock()
        self._numbers: dict[str, int] = {}
        self._layers: list[TracedLayer] = []
        self._layers_C, self._tokens_C, self._ids_N = array("h"), array("i"), array("h")
        self.hooks = ExitStack()
        experts = {n: m for n, m in model.named_modules() if isinstance(m, PackedExperts) or has_interface(m)}
        if not experts:
            raise UnsupportedProblem(
                _WHERE, expected="experts that polymoe runs", got=f"none in {type(model).__name__}"
            )
        for name, module in experts.items():
            self.hooks.callback(module.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)

    @property
    def seen(self) -> int:
        """Calls so far."""
        return len(self._tokens_C)

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], others: Mapping[str, Any]) -> None:
            x_TH, ids_TA, _ = checked_call(type(module).__name__, args, others)
            if capturing(x_TH):
                got, hint = "a call that a CUDA graph captures", "its replays would not be seen: do without graphs"
                raise UnsupportedProblem(_WHERE, expected="calls that run as they are", got=got, hint=hint)
            self._add(name, module, ids_TA)

        return torch.compiler.disable(note, reason=_COMPILED)

    def _add(self, name: str, module: nn.Module, ids_TA: Tensor) -> None:
        tokens, top_k = ids_TA.shape
        ids = ids_TA.flatten().tolist()
        with self._lock:
            if name not in self._numbers:
                self._numbers[name] = len(self._layers)
                self._layers.append(TracedLayer(name, *_sizes(module), top_k=top_k))
            number = self._numbers[name]
            if top_k != self._layers[number].top_k:
                expected = f"{self._layers[number].top_k} experts of each token, as before"
                raise UnsupportedProblem(f"{_WHERE}: {name}", expected=expected, got=str(top_k))
            self._ids_N.extend(ids)
            self._layers_C.append(number)
            self._tokens_C.append(tokens)  # last: a call counts from here, also where Ctrl-C comes in between

    def trace(self) -> RoutingTrace:
        """What was recorded.

        Raises:
            UnsupportedProblem: if that is nothing.
        """
        if not self.seen:
            hint = "what was compiled or captured in a CUDA graph before goes on without being seen"
            raise UnsupportedProblem(_WHERE, expected="calls of the experts", got="none", hint=hint)
        with self._lock:
            # By NumPy, which copies an array at once; torch reads it number by number.
            tokens_C = torch.from_numpy(np.array(self._tokens_C))
            layers_C = torch.from_numpy(np.array(self._layers_C))[: self.seen]
            ids_N = torch.from_numpy(np.array(self._ids_N))[: number_of_ids(self._layers, layers_C, tokens_C)]
            return RoutingTrace(Path(self._model.name_or_path).name, tuple(self._layers), layers_C, tokens_C, ids_N)


_WHERE = "record_routing"
_COMPILED = "routing is recorded, which reads the ids on the host (polymoe's record_routing)"


def _sizes(module: Any) -> tuple[int, int]:
    """Experts of a module, and bytes of each as it is stored."""
    if isinstance(module, PackedExperts):
        assert module.fused is not None
        spec = module.fused.problem.spec
        return spec.local_experts, spec.expert_bytes
    experts = len(getattr(module, first_parameter(module)))
    return experts, sum(p.nbytes for p in module.parameters(recurse=False)) // experts
