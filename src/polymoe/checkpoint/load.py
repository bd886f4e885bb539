"""Checkpoint: the entry point to a checkpoint. Gives a layer's sizes, its problem, and its experts one at a time.

::

    with Checkpoint.open("openai/gpt-oss-20b") as checkpoint:
        checkpoint.layers                        # (0, 1, ... 23)
        checkpoint.problem(3, tp=2)              # from headers alone
        expert = checkpoint.weights(3).expert(5) # views of the mapped files
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polymoe.checkpoint.arrangement import Fused, PerExpert
from polymoe.checkpoint.config import QuantizationConfig, parse_quantization
from polymoe.checkpoint.dense_tensors import DenseTensors
from polymoe.checkpoint.families import ModelFamily, MoeConfig, families_of
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.layer import StoredLayer
from polymoe.checkpoint.quantized import QuantizedReader, quantized_spec, recipe_of, require_format
from polymoe.checkpoint.shard import Parallel, Shard, shard_expert, shard_spec, widths
from polymoe.errors import CheckpointNotFound
from polymoe.problem import Dtype, Problem
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights


class Checkpoint:
    """An open mixture-of-experts checkpoint; close it, or use it as a context manager.

    Layers are looked up on request, so the files may contain only some of them. Dtypes and shapes of the tensors define
    a layer; without tensors (a config alone), the config does.

    Attributes:
        name: the path or Hub id that was opened.
        files: its files.
        family: its row in ``MODEL_FAMILIES``, or what Transformers says of its experts.
        parts: checkpoints of the same files for each group of equal experts, this one first. There is one, unless
            experts differ in size, or layers have two experts modules.
        moe: its experts according to the config.
        quantization: the encoding of each module according to the config.
        experts: the format to which experts in 16 bits are quantized as they are read; None leaves them as stored.
    """

    def __init__(
        self, name: str, files: CheckpointFiles, family: ModelFamily | None = None, *, experts: str | None = None
    ) -> None:
        self.name, self.files = name, files
        self.experts = experts if experts is None else require_format(experts)
        families = families_of(files.config, files.names) if family is None else (family,)
        self.family: ModelFamily = families[0]
        others = (Checkpoint(name, files, other, experts=experts) for other in families[1:])
        self.parts: tuple[Checkpoint, ...] = (self, *others)
        self.moe: MoeConfig = self.family.moe(files.config)
        self.quantization: QuantizationConfig = parse_quantization(files.config, files.side, self.family)
        self._found: dict[int, StoredLayer] = {}
        self._layers: dict[int, StoredLayer] = {}
        # Layers and experts whose tensors are known to be in the files, and to be stored as the first expert's.
        self._present: set[tuple[int, range]] = set()
        self._alike: set[tuple[int, range]] = set()
        self._said: set[str] = set()

    @classmethod
    def open(cls, path: str | Path, *, config_only: bool = False, experts: str | None = None, **hub: Any) -> Checkpoint:
        """Open a directory, a ``config.json`` alone, or a Hub id; reads configs but no tensors.

        Args:
            path: an existing path, else a Hub repository ``org/name``, which is downloaded.
            config_only: use no tensors; of a Hub repository, fetch only the config files.
            experts: a format, such as "mxfp4", to which experts in 16 bits are quantized as they are read.
            hub: of a Hub repository: ``revision`` (branch, tag or commit), ``cache_dir``, ``token``,
                ``local_files_only``.

        Raises:
            ArgumentError: for an unknown format.
            CheckpointNotFound: if nothing is found.
            CheckpointError: if it cannot be read, or its family, activation or quantization is unknown.
        """
        return cls(str(path), CheckpointFiles.open(path, config_only=config_only, **hub), experts=experts)

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``."""
        return self.files.config

    @property
    def model_type(self) -> str:
        """The config's ``model_type``."""
        return str(self.config.get("model_type"))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending, whether or not their tensors are in the files."""
        return self.moe.layers

    @property
    def layers_here(self) -> tuple[int, ...]:
        """Layers whose expert tensors are in the files, judged by the first expert."""
        return tuple(layer for layer in self.layers if self._find(layer) is not None)

    def layer(self, layer: int) -> StoredLayer:
        """Return how a layer's experts are stored: from its tensors if they are in the files, else from the config.

        Raises:
            CheckpointNotFound: if the layer has no routed experts.
            CheckpointError, FormatError: if a tensor is missing or invalid.
        """
        self.moe.place(layer)  # raises for a layer without experts
        if layer not in self._layers:
            described = partial(StoredLayer.described, self.family, self.moe, self.quantization, layer)
            self._layers[layer] = self._find(layer) or described()
        return self._layers[layer]

    def spec(self, layer: int, *, tp: Parallel = 1, ep: Parallel = 1) -> ExpertsSpec:
        """Sizes and encodings of a layer's experts on one rank: ``(rank, size)``, or a size alone for rank 0.

        Raises:
            CheckpointNotFound: the layer has no routed experts, or its tensors are not here.
            CheckpointError, FormatError: if a tensor is missing or invalid.
            ArgumentError: a size that would cut a group of weights or leave a rank with nothing.
        """
        stored = self.layer(layer)
        spec = shard_spec(self._whole(stored), Shard.of(tp, ep), uneven=self.family.uneven_tp)
        if self._find(layer) is not None and (layer, spec.local_range) not in self._present:
            stored.require_experts(self.files, spec.local_range)
            self._present.add((layer, spec.local_range))
        return spec

    def recipe(self, layer: int) -> ActivationQuantization:
        """How the checkpoint's authors meant the inputs of a layer's experts to be quantized."""
        return self.layer(layer).recipe() if self.experts is None else recipe_of(self.experts)

    def problem(
        self,
        layer: int,
        *,
        tp: Parallel = 1,
        ep: Parallel = 1,
        dtype: Dtype = "bf16",
        activations: ActivationQuantization = UNQUANTIZED,
        batch_invariant: bool = False,
    ) -> Problem:
        """The problem that a layer's experts pose to a kernel on one rank; raises as :meth:`spec`."""
        shard = Shard.of(tp, ep)
        return Problem(
            spec=self.spec(layer, tp=tp, ep=ep),
            activation=self.moe.activation,
            top_k=self.moe.top_k,
            weight_on=self.moe.weight_on,
            dtype=dtype,
            activations=activations,
            tp=shard.tp,
            ep=shard.ep,
            batch_invariant=batch_invariant,
        )

    def weights(
        self, layer: int, *, tp: Parallel = 1, ep: Parallel = 1, device: torch.device | str | None = None
    ) -> ExpertWeights:
        """A layer's experts on one rank, each read, checked and sliced when it is asked for.

        ``device`` is where :attr:`experts` are quantized, and then are; None is the CPU.

        Raises:
            CheckpointNotFound: also if only a config was opened.
            CheckpointError, FormatError, ArgumentError: as :meth:`spec`; of an expert, when it is read.
        """
        shard = Shard.of(tp, ep)
        self.moe.place(layer)
        # find(), not layer(): its message names the tensors that are not here.
        stored = self._find(layer) or StoredLayer.find(self.files, self.family, self.moe, self.quantization, layer)
        whole = self._whole(stored)
        spec = shard_spec(whole, shard, uneven=self.family.uneven_tp)
        # Before anybody allocates memory for as many experts as the config says.
        if (layer, spec.local_range) not in self._alike:
            stored.check_experts(self.files, spec.local_range)
            self._alike.add((layer, spec.local_range))

        def plain(e: int, check: bool) -> Expert:
            return stored.read(self.files, e, check=check)

        where = torch.device(device or "cpu")
        # Quantized whole, before they are sliced, so that every rank has the same codes.
        quantized = self.experts and QuantizedReader(
            plain, whole.encodings, lambda e, part: stored.where(part, e), spec.local_range, where
        )

        def read(e: int, *, check: bool = True) -> Expert:
            index = spec.first_expert + e
            expert = quantized(index, check=check) if quantized else plain(index, check)
            return shard_expert(expert, shard, uneven=self.family.uneven_tp)

        return ExpertWeights(spec, read, partial(read, check=False))

    def dense_tensors(self, *, as_stored: bool = False) -> DenseTensors:
        """Every tensor outside the experts, by name, as if nothing were quantized - or just ``as_stored``."""
        stored = [part.layer(layer) for part in self.parts for layer in part.layers]
        alone = {layer.container for layer in stored if isinstance(layer.arrangement, PerExpert)}
        stacked = tuple(
            f"{layer.container}.{stem}"
            for layer in stored
            if isinstance(layer.arrangement, Fused)
            for stem in (layer.arrangement.gate_up, layer.arrangement.down)
        )

        def is_expert(name: str) -> bool:
            container, *rest = name.rsplit(".", 3)
            return name.startswith(stacked) or (len(rest) == 3 and rest[0].isdecimal() and container in alone)

        return DenseTensors(self.files, self.quantization, is_expert, as_stored=as_stored)

    def all_tensors(self) -> DenseTensors:
        """Every tensor by name, with those of the experts, as stored."""
        return DenseTensors(self.files, self.quantization, as_stored=True)

    def notes(self, *, tp: Parallel = 1) -> tuple[str, ...]:
        """What else a reader of an explanation should know: tensor-parallel slices that are not equal."""
        size = Shard.of(tp).tp
        said: dict[str, None] = {}
        for layer in self.layers:
            spec = self._whole(self.layer(layer))
            each = widths(spec.intermediate, spec.encodings, size, uneven=self.family.uneven_tp)
            if len(set(each)) > 1:
                slices = f"{each[0]} on {each.count(each[0])} ranks, {each[-1]} on the last"
                said[f"tp={size}: F={sum(each)} in slices of whole groups: {slices}"] = None
        return tuple(said)

    def first_time(self, text: str) -> bool:
        """Whether ``text`` comes for the first time: what holds for many layers of a checkpoint is said once."""
        new = text not in self._said
        self._said.add(text)
        return new

    def close(self) -> None:
        """Forget the opened files; tensors that are still referenced stay valid."""
        self.files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, _: object) -> Checkpoint:
        """The same object: files that are open cannot be copied."""
        return self

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, {self.model_type}, {len(self.layers)} layers with experts)"

    def _whole(self, stored: StoredLayer) -> ExpertsSpec:
        """Sizes and encodings of a whole layer's experts, as they are read."""
        spec = stored.spec()
        return spec if self.experts is None else quantized_spec(spec, self.experts, f"{self.name}: {stored.container}")

    def _find(self, layer: int) -> StoredLayer | None:
        """The layer by its tensors, or None if none of them is here."""
        if not self.files.has_tensors:
            return None
        if layer not in self._found:
            try:
                found = StoredLayer.find(self.files, self.family, self.moe, self.quantization, layer)
            except CheckpointNotFound:
                return None
            self._warn_of_difference(found)
            self._found[layer] = found
        return self._found[layer]

    def _warn_of_difference(self, stored: StoredLayer) -> None:
        """Log each kind of difference between tensors and config once."""
        for part in stored.parts.values():
            if not part.as_configured:
                text = f"{part.scheme}; tensors: {part.encoding.name}"
                if self.first_time(text):
                    message = f"{self.name}: {stored.container} {part.name}: config: {text}, {part.dialect.name}"
                    warnings.warn(f"{message}. The tensors take precedence.", stacklevel=4)
