"""Time decode steps and prefill of a whole model in Transformers: with packed experts, with dequantized ones, and with
those that Transformers keeps packed itself.

The decoded tokens are given and the same for every model, so that all models read the same experts and their logits can
be compared. The greedy choice is computed as well. A model whose logits differ is not timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymoe.bench.model_bytes import experts_modules, held_bytes, step_bytes
from polymoe.bench.model_records import Failed, ModelRecord
from polymoe.bench.records import Stamp
from polymoe.bench.timing import Timing, synchronize
from polymoe.engines.transformers.model_config import context_length
from polymoe.errors import ArgumentError, PolymoeError, VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import cache_stats_of
from polymoe.machine import Device
from polymoe.problem.numerics import relative_error

if TYPE_CHECKING:
    from polymoe.engines.transformers.decode_graph import Decoder

LOGITS_TOLERANCE = 5e-2
"""Largest relative difference between logits of two ways to run a model, as the median over positions. Transformers'
own experts implementations differ by 2.4e-2 on 24 layers of random bfloat16 weights, as rounding changes routing."""

COMPARED = 8
"""Steps whose logits are compared, however few are timed."""

_WAYS = {"graph": "compiled as one graph", "parts": "compiled in parts", "plain": "not compiled"}
"""How steps run; the first two are captured in a CUDA graph and replayed."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the model.

    Attributes:
        experts: "packed", "dequantized" or "transformers-packed".
        implementations: experts implementations to measure; packed experts run on the backends of their plan.
        load: returns the model.
        foreign: whether kernels from elsewhere run it, which may be missing and raise anything. Then a failure is a
            result, and a step that does not compile as one graph is tried in parts, then as it is.
        within: makes the context in which it is loaded and measured.
        expert_memory: GPU memory for experts, which lie in host memory then; as in records.
    """

    experts: str
    implementations: tuple[str, ...]
    load: Callable[[], Any]
    foreign: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    expert_memory: str | None = None


@dataclass(slots=True, kw_only=True)
class ModelBench:
    """The measurements of each model, and the logits of the first one.

    Attributes:
        checkpoint: its name in records.
        prompt_len, steps: tokens before the first timed step, and steps that are timed together.
        prefill_len: tokens of the timed prefill; 0 for none.
        prefill_attention: attention implementation of that prefill; None for the model's own.
        repeats: how often the steps, and the prefill, are timed.
        graphs: compile the step and replay it from a CUDA graph.
        device, stamp: where it runs, and what all records share.
    """

    checkpoint: str
    prompt_len: int
    steps: int
    prefill_len: int
    prefill_attention: str | None
    repeats: int
    graphs: bool
    device: Device
    stamp: Stamp
    _logits: dict[int, Tensor] = field(default_factory=dict, init=False)
    _floors: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)  # and experts read, by batch

    def rows(
        self, contenders: Sequence[Contender], batches: Sequence[int], say: Callable[[str], None]
    ) -> Iterator[ModelRecord | Failed]:
        """Load and measure one contender after the other; the packed one comes first, for comparison.

        Raises:
            VerificationError: see :meth:`decode`; of others than the packed model at the end, when all were measured.
        """
        wrong: list[VerificationError] = []
        for contender in contenders:
            with contender.within():
                yield from self._of(contender, batches, say, wrong)
        if wrong:
            raise wrong[0]

    def _of(
        self, contender: Contender, batches: Sequence[int], say: Callable[[str], None], wrong: list[VerificationError]
    ) -> Iterator[ModelRecord | Failed]:
        from polymoe.engines.transformers.without_polymoe import fixed_kernels

        experts = contender.experts
        say(f"loading {experts}")
        before = _free()
        try:
            model = contender.load()
        except Exception as error:
            if not contender.foreign:
                raise
            yield Failed(experts, _reason(error))
            return
        held = {"weight_bytes": held_bytes(model, before), "expert_memory": contender.expert_memory}
        fixed = fixed_kernels(model)
        for chosen in (fixed,) if fixed else contender.implementations or (None,):
            if chosen is not None and not fixed:
                model.set_experts_implementation(chosen)
            for phase, batch in [("decode", b) for b in batches] + [("prefill", 1)] * bool(self.prefill_len):
                tokens = batch if phase == "decode" else self.prefill_len
                implementation = _backends(model, tokens) if chosen is None else chosen
                if experts == "dequantized" and _copies_more_than_all(model, implementation, tokens):
                    continue
                ran = {"experts": experts, "implementation": implementation, **held}
                say(f"{experts}, {implementation}: {phase}, batch {batch}")
                captured = tuple(_WAYS) if contender.foreign else ("graph",)
                for way in captured if phase == "decode" and self.graphs else ("plain",):
                    try:
                        if phase == "decode":
                            yield self.decode(model, ran, batch, way)
                        else:
                            yield self.prefill(model, ran)
                        break
                    except Exception as error:
                        # Of torch: compilation or memory. Of Transformers' experts: a package that is missing. Of
                        # foreign kernels: anything. Without packed decode steps there is nothing to compare the others
                        # with.
                        known = isinstance(error, (RuntimeError, NotImplementedError, ImportError))
                        known |= contender.foreign and not isinstance(error, ArgumentError)
                        if not known or (experts == "packed" and phase == "decode"):
                            raise
                        how = f" ({_WAYS[way]})" if contender.foreign else ""
                        yield Failed(experts, _reason(error) + how, implementation, phase, batch)
                        if isinstance(error, VerificationError):
                            wrong.append(error)
                            break
                    torch._dynamo.reset()

    def decode(self, model: Any, ran: Mapping[str, Any], batch: int, way: str) -> ModelRecord:
        """Compare and time decode steps of a batch, run in one of the ``_WAYS``; ``ran`` has the fields of records that
        say what the model is.

        Raises:
            VerificationError: if logits of the captured step differ from those of the plain step or the first model.
        """
        from polymoe.engines.transformers.decode_graph import Decoder

        prompts_BT, given_NB1 = self._tokens(model, batch)
        most = self.prompt_len + max(self.steps, COMPARED)
        plain = Decoder(model, max_tokens=most, compile=None, capture=False)
        with _counted(model) as read:
            expected = _logits(plain, prompts_BT, given_NB1)
        layers = len(experts_modules(model))
        floor_us, experts_read = self._floors.get(batch, (None, None))
        if counted := read[layers:]:  # the first call of each layer is the prompt
            experts_read = sum(counted) / len(counted)
            moved = step_bytes(model, batch, self.prompt_len, experts_read * layers)
            floor_us = 1e6 / self.device.bandwidth * moved
            if ran["experts"] == "packed":
                self._floors[batch] = floor_us, experts_read
        decoder = plain if way == "plain" else Decoder(model, max_tokens=most, whole=way == "graph")
        what = f"{ran['experts']} ({ran['implementation']}), batch {batch}"
        got = _logits(decoder, prompts_BT, given_NB1)
        _compare(f"{what}: captured steps", got, expected)
        difference = None
        if batch in self._logits:
            difference = _compare(f"{what}: logits", got, self._logits[batch])
        elif ran["experts"] == "packed":
            self._logits[batch] = got

        def steps() -> None:
            for token_B1 in given_NB1[: self.steps]:
                decoder.step(token_B1).argmax(-1)

        timed = (lambda: decoder.prefill(prompts_BT)), steps
        timing = self._time(*timed, model.device)
        return self._record(
            phase="decode", batch=batch, tokens=self.prompt_len, timing=timing, count=self.steps, new=batch,
            floor_us=floor_us, experts_read=experts_read, difference=difference, graphs=way != "plain",
            attention=model.config._attn_implementation, **ran, **self._copied(model, *timed),
        )  # fmt: skip

    def _copied(self, model: Any, before: Callable[[], Any], steps: Callable[[], Any]) -> dict[str, float]:
        """Counts of experts in host memory in a run of the steps, for each step and layer; none without slots."""
        if not cache_stats_of(model):
            return {}
        before()
        start = cache_stats_of(model)
        steps()
        end = cache_stats_of(model)
        calls = len(end) * self.steps
        return {
            key: round(sum(end[layer][key] - start[layer][key] for layer in end) / calls, 3)
            for key in ("hits", "misses", "copied_bytes")
        }

    def prefill(self, model: Any, ran: Mapping[str, Any]) -> ModelRecord:
        """Time one prompt without compilation, as ``generate`` runs it; ``ran`` as for :meth:`decode`.

        Raises:
            ArgumentError: for an attention implementation that cannot run the model here.
        """
        g = torch.Generator().manual_seed(2)
        own = model.config._attn_implementation
        attention = self.prefill_attention or own
        ids_BT = torch.randint(model.config.vocab_size, (1, self.prefill_len), generator=g).to(model.device)
        try:
            model.set_attn_implementation(attention)
            with torch.inference_mode():
                timing = self._time(lambda: None, lambda: model(ids_BT, use_cache=True, logits_to_keep=1), model.device)
        except (ValueError, ImportError) as error:
            if self.prefill_attention is None:  # decode steps have run with this attention: something else fails
                raise
            raise ArgumentError("prefill_attention", expected="one that runs the model here", got=str(error)) from error
        finally:
            model.set_attn_implementation(own)
        return self._record(
            phase="prefill", batch=1, tokens=self.prefill_len, timing=timing, **ran,
            count=1, new=self.prefill_len, attention=attention, graphs=False,
        )  # fmt: skip

    def _tokens(self, model: Any, batch: int) -> tuple[Tensor, Tensor]:
        """Return prompts [B, T] and the tokens to decode [N, B, 1]."""
        g = torch.Generator().manual_seed(1)
        most = self.prompt_len + max(self.steps, COMPARED)
        context = context_length(model)
        if context is not None and max(most, self.prefill_len) > context:
            got = str(max(most, self.prefill_len))
            raise ArgumentError("tokens", expected=f"at most {context}, the model's context", got=got)
        ids_BT = torch.randint(model.config.vocab_size, (batch, most), generator=g).to(model.device)
        return ids_BT[:, : self.prompt_len], ids_BT[:, self.prompt_len :].T[:, :, None].contiguous()

    def _time(self, before: Callable[[], Any], run: Callable[[], Any], device: torch.device) -> Timing:
        samples = []
        for _ in range(self.repeats + 1):  # the first one warms up
            before()
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            samples.append(1e6 * (time.perf_counter() - start))
        return Timing.of(samples[1:], "calls")

    def _record(
        self,
        *,
        timing: Timing,
        count: int,
        new: int,
        floor_us: float | None = None,
        experts_read: float | None = None,
        difference: float | None = None,
        **what: Any,
    ) -> ModelRecord:
        import transformers

        median_us = timing.median_us / count
        return ModelRecord(
            checkpoint=self.checkpoint,
            median_us=round(median_us, 2),
            p25_us=round(timing.p25_us / count, 2),
            p75_us=round(timing.p75_us / count, 2),
            tokens_per_second=round(1e6 * new / median_us, 2),
            floor_us=None if floor_us is None else round(floor_us, 2),
            share=None if floor_us is None else round(floor_us / median_us, 4),
            experts_read=None if experts_read is None else round(experts_read, 3),
            difference=None if difference is None else float(f"{difference:.3g}"),
            transformers=transformers.__version__,
            bandwidth_tb_s=self.device.bandwidth / 1e12,
            **self.stamp.fields(),
            **what,
        )


def _logits(decoder: Decoder, prompts_BT: Tensor, given_NB1: Tensor) -> Tensor:
    """Return the logits of the compared steps on the host: [N, B, V]."""
    decoder.prefill(prompts_BT)
    return torch.stack([decoder.step(token_B1).cpu() for token_B1 in given_NB1[:COMPARED]])


def _compare(what: str, got: Tensor, expected: Tensor) -> float:
    rows = zip(got.flatten(0, 1), expected.flatten(0, 1), strict=True)
    error = float(torch.tensor([relative_error(a, b) for a, b in rows]).median())
    if not error <= LOGITS_TOLERANCE:  # NaN fails too
        raise VerificationError(
            what,
            expected=f"logits within {LOGITS_TOLERANCE:g} of those they are compared with",
            got=f"{error:.3g}",
            hint="it was not timed",
        )
    return error


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Yield a list to which every call of an experts module with (x, ids, weights) appends the number of experts that
    it reads. Transformers calls its packed MXFP4 experts otherwise."""
    counts: list[int] = []

    def count(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) == 3 and isinstance(args[1], Tensor):
            counts.append(len(args[1].unique()))

    hooks = [module.register_forward_pre_hook(count) for module in experts_modules(model)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _reason(error: Exception) -> str:
    """The first line of an error, and its type where it is neither torch's nor ours."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, (PolymoeError, RuntimeError)) and text else f"{type(error).__name__}: {text}"


def _backends(model: Any, tokens: int) -> str:
    """Name the backends that run calls with that many tokens; several if layers differ."""
    layers = [module for module in model.modules() if isinstance(module, FusedExperts)]
    return "+".join(sorted({layer.explain().require().step(tokens).backend for layer in layers}))


def _copies_more_than_all(model: Any, implementation: str, tokens: int) -> bool:
    """Whether batched_mm would copy more experts than the layer has: it copies the experts of every token."""
    if implementation != "batched_mm":
        return False
    experts = max((len(next(module.parameters())) for module in experts_modules(model)), default=0)
    return tokens * model.config.get_text_config().num_experts_per_tok > experts


def _free() -> int:
    """Free the memory of the last model and return the bytes that are still allocated on the GPU."""
    gc.collect()
    torch._dynamo.reset()  # it keeps references to compiled models
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
