"""Fit: whether a model's weights fit the GPUs that serve it together, and how much context has room beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.dense_size import DenseSize
from polymoe.checkpoint.known_models import dense_size_of, known_models
from polymoe.checkpoint.kv_cache import KvCache, attention_heads, kv_cache
from polymoe.checkpoint.shard import Parallel, Shard
from polymoe.common.units import format_bytes, format_count
from polymoe.errors import ArgumentError
from polymoe.machine import Device

RESERVE = 0.05
"""Share of the device's memory for the CUDA context, workspaces and activations."""

_FORMAT = re.compile(r"-(bf16|fp8|nvfp4|mxfp4|awq|(gptq-)?int4)$", re.IGNORECASE)
"""How the name of a release ends that differs from another one in its format alone."""
_SIZES_TRIED = (2, 4, 8, 16, 32, 64, *range(3, 64))


def usable_bytes(memory_bytes: int) -> int:
    """Bytes of a GPU's memory for weights and the KV cache: all but :data:`RESERVE`."""
    return round(memory_bytes * (1 - RESERVE))


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of ``tp * dp`` GPUs that serve a model together, counted as engines count them.

    Attributes:
        tp: GPUs that slice attention and dense layers.
        dp: groups of ``tp`` GPUs that serve requests of their own; each GPU of every group holds a slice of attention.
        ep: parts into which the experts are shared out among all the GPUs. The GPUs of one part slice its experts.
        tp_rank, ep_rank: the GPU; its tensor parallel rank counts within its part where ``ep`` is above 1.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    tp_rank: int = 0
    ep_rank: int = 0

    @classmethod
    def of(cls, tp: Parallel = 1, ep: Parallel = 1, dp: int = 1) -> Ranks:
        """Create from sizes, or ``(rank, size)``.

        Raises:
            ArgumentError: for ranks out of range, and for groups that no engine can start.
        """
        given, groups = Shard.of(tp, ep), Shard.of(dp)
        found = cls(given.tp, groups.tp, given.ep, given.tp_rank, given.ep_rank)
        if found.gpus % found.ep:
            size = found.ep
            raise ArgumentError(
                "ep",
                expected=f"a number that divides tp * dp, which is {found.gpus}: the GPUs that share out the experts",
                got=str(size),
                hint=f"tp={size} and ep={size} slice attention over {size} GPUs; dp={size} and ep={size} repeat it",
            )
        return found

    @property
    def gpus(self) -> int:
        """Their number."""
        return self.tp * self.dp

    @property
    def experts(self) -> Shard:
        """This GPU's part of the experts."""
        each = self.gpus // self.ep
        return Shard(tp_rank=self.tp_rank % each, tp=each, ep_rank=self.ep_rank, ep=self.ep)

    def require_heads(self, checkpoint: Checkpoint) -> None:
        """Check that whole attention heads are split.

        Raises:
            ArgumentError: if engines refuse ``tp`` for this model.
        """
        heads = attention_heads(checkpoint.config)
        if heads and heads % self.tp:
            raise ArgumentError(
                "tp", expected=f"a number that divides the model's {heads} attention heads", got=str(self.tp)
            )

    def in_terms(self, error: ArgumentError) -> ArgumentError:
        """Return an error of :attr:`experts` in terms of the sizes that were asked for."""
        slices = self.experts.tp
        if slices == self.tp or error.where != f"tp={slices}":
            return error
        where = f"tp * dp / ep, {self.tp} * {self.dp} / {self.ep}"
        expected = f"{slices} GPUs that each hold a slice of whole groups of the same experts"
        hint = error.hint and error.hint.replace("tensor parallel sizes", "numbers of such GPUs")
        return ArgumentError(where, expected=expected, got=error.got, hint=hint)

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("dp", self.dp), ("ep", self.ep))
        return ", ".join(f"{name}={size}" for name, size in sizes if size > 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of one GPU.

    Attributes:
        name: of the checkpoint.
        device: the GPU, or a CPU.
        ranks: those that serve the model together.
        expert_bytes: of all layers' experts on this GPU, as stored.
        dense: size of everything outside the experts on this GPU; None where it is not known.
        kv: what attention keeps of each token; None where it is not known.
        variants: name and format of releases in other formats that fit, if it does not.
        suffices: ranks with which the model fits: the least power of two up to 64 GPUs, else the least other number;
            None if there are none, or if it fits already.
    """

    name: str
    device: Device
    ranks: Ranks
    expert_bytes: int
    dense: DenseSize | None = None
    kv: KvCache | None = None
    suffices: Ranks | None = None
    variants: tuple[tuple[str, str], ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are known."""
        return self.expert_bytes + (self.dense.total_bytes if self.dense else 0)

    @property
    def cache_bytes(self) -> int | None:
        """Device memory that is left for the KV cache beside weights and :data:`RESERVE`; None for a CPU. Negative
        where the weights do not fit."""
        if self.device.kind != "cuda":
            return None
        return usable_bytes(self.device.memory_bytes) - self.weight_bytes

    @property
    def fits(self) -> bool | None:
        """Whether all weights that are known fit; None for a CPU."""
        return None if self.cache_bytes is None else self.cache_bytes >= 0

    @property
    def cache_tokens(self) -> int | None:
        """Tokens of context that one data parallel group has room for, in 16 bit; None where a size is not known."""
        each = self.kv.token_bytes(self.ranks.tp) if self.kv else 0
        if not each or self.dense is None or self.cache_bytes is None:
            return None
        return max(self.cache_bytes, 0) // each

    def line(self) -> str:
        """The answer on a GPU, as a sentence."""
        room, several = self.cache_bytes, self.ranks.gpus > 1
        assert room is not None
        weights, memory = format_bytes(self.weight_bytes), format_bytes(self.device.memory_bytes)
        what = "weights" if self.dense else "experts"
        beyond = "" if self.dense else "; a config does not contain the size of the other weights"
        where = f"{self.ranks.gpus} x {self.device.name}" if several else self.device.name
        each = " on each" if several else ""
        if room < 0:
            kept = f" less {RESERVE:.0%} for workspaces" if self.weight_bytes <= self.device.memory_bytes else ""
            need = f"{what} need {weights}{each}, one GPU has {memory}{kept}"
            return f"does not fit on {where}: {need}; {self._remedy()}{beyond}"
        left = format_bytes(room)
        if not self.dense:
            on = f"each of {where}" if several else where
            return f"{weights} of experts leave {left} on {on} for everything else{beyond}"
        return f"fits on {where}: {weights} of weights leave {left}{each} for the KV cache{self._context()}"

    def _remedy(self) -> str:
        found = self.suffices
        named = ", ".join(f"{name} ({form})" for name, form in self.variants)
        others = f"; in other formats it fits: {named}" if named else ""
        if found is None:
            return f"no group of up to {max(_SIZES_TRIED)} GPUs suffices{others}"
        tp = f" --tensor-parallel-size {found.tp}" if found.tp > 1 or found.dp == 1 else ""
        dp = f" --data-parallel-size {found.dp}" if found.dp > 1 else ""
        experts = " --enable-expert-parallel" if found.ep > 1 else ""
        command = f"vllm serve {self.name}{tp}{dp}{experts}"
        return f"{found.gpus} GPUs suffice: {command}{others}"

    def _context(self) -> str:
        """How much context that is, as a clause."""
        if self.kv is None or self.cache_tokens is None:
            return ""
        most = f" (the model's longest context is {self.kv.max_tokens:,})" if self.kv.max_tokens else ""
        groups = f" in each of {self.ranks.dp} data parallel groups" if self.ranks.dp > 1 else ""
        return f", {format_count(self.cache_tokens)} tokens in 16 bits{groups}{most}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "gpus": self.ranks.gpus,
            "fits": self.fits,
            "memory_bytes": self.device.memory_bytes or None,
            "weight_bytes": self.weight_bytes,
            "dense_bytes": self.dense.total_bytes if self.dense else None,
            "cache_bytes": self.cache_bytes,
            "cache_tokens": self.cache_tokens,
            "cache_bytes_per_token": self.kv.token_bytes(self.ranks.tp) if self.kv else None,
            "max_context": self.kv.max_tokens if self.kv else None,
            "gpus_that_suffice": self.suffices.gpus if self.suffices else None,
            "variants_that_fit": [name for name, _ in self.variants],
            "tp_that_fits": self.suffices.tp if self.suffices else None,
            "dp_that_fits": self.suffices.dp if self.suffices else None,
            "ep_that_fits": self.suffices.ep if self.suffices else None,
        }


def fit_of(checkpoint: Checkpoint, device: Device, ranks: Ranks) -> Fit:
    """Return whether a checkpoint fits; its experts as stored.

    Raises:
        ArgumentError: if ``ranks`` would split a group of weights or a head, or leave a rank without experts.
        CheckpointError: if the checkpoint cannot be understood.
    """
    ranks.require_heads(checkpoint)
    dense = dense_size_of(checkpoint)
    found = _fit(checkpoint, device, ranks, dense)
    if found.fits is not False:
        return found
    variants = _variants_that_fit(checkpoint.name, device, ranks)
    return replace(found, suffices=_that_suffice(checkpoint, device, dense), variants=variants)


def _fit(checkpoint: Checkpoint, device: Device, ranks: Ranks, dense: DenseSize | None) -> Fit:
    shard = ranks.experts
    tp, ep = (shard.tp_rank, shard.tp), (shard.ep_rank, shard.ep)
    experts = sum(p.spec(layer, tp=tp, ep=ep).local_bytes for p in checkpoint.parts for layer in p.layers)
    sliced = dense and dense.sliced(ranks.tp)
    return Fit(str(checkpoint.name), device, ranks, experts, sliced, kv_cache(checkpoint.config))


def _that_suffice(checkpoint: Checkpoint, device: Device, dense: DenseSize | None) -> Ranks | None:
    """Return the least ranks at which all weights fit, with sliced experts or else whole ones; None if none do.

    Groups that repeat attention come last: they need more GPUs than those that slice it, but attention heads do not
    limit their number.
    """
    one_group = (ranks for size in _SIZES_TRIED for ranks in (Ranks(size), Ranks(size, ep=size)))
    groups = (Ranks(tp, dp=size // tp, ep=size) for size in _SIZES_TRIED[:6] for tp in (8, 4, 2, 1) if tp < size)
    for ranks in (*one_group, *groups):
        try:
            ranks.require_heads(checkpoint)
            found = _fit(checkpoint, device, ranks, dense)
        except ArgumentError:
            continue
        if found.fits:
            return ranks
    return None


def _variants_that_fit(name: str, device: Device, ranks: Ranks) -> tuple[tuple[str, str], ...]:
    """Return name and format of the known releases of the same model in other formats that fit; the largest first."""
    found = []
    for other in known_models().values():
        if other.name != name and _release(other.name) == _release(name):
            checkpoint = other.checkpoint()
            try:
                fit = _fit(checkpoint, device, ranks, other.dense)
            except ArgumentError:  # these ranks would split a group of its weights
                continue
            if fit.fits:
                found.append((-fit.weight_bytes, other.name, checkpoint.spec(checkpoint.layers[0]).format))
    return tuple((variant, form) for _, variant, form in sorted(found))


def _release(name: str) -> str:
    """The model of a Hub id, whoever released it and in whichever format."""
    return _FORMAT.sub("", name.rpartition("/")[2]).lower()
