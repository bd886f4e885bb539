"""PackedQuantizer: the hooks that Transformers calls around loading, for checkpoints whose experts are to be packed.

Transformers reads a checkpoint without experts in which nothing is quantized
(:meth:`polymoe.checkpoint.Checkpoint.dense_tensors`), so that it renames and rearranges tensors as for a 16-bit
checkpoint.
Then :func:`polymoe.load_experts` packs the experts, layer by layer.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.dense_tensors import DenseTensors
from polymoe.checkpoint.plain_experts import PlainExperts
from polymoe.common.shapes import ceil_div
from polymoe.engines.transformers.dense_quantizer import dense_quantizer
from polymoe.engines.transformers.experts_interface import INTERFACE_NAME
from polymoe.engines.transformers.families import family_named, pack_modules
from polymoe.engines.transformers.weights import watch_loading
from polymoe.errors import ArgumentError, PolymoeError, UnsupportedProblem
from polymoe.layer.load import load_experts
from polymoe.layer.offload import slots_here
from polymoe.machine import Machine
from polymoe.planning.agreement import require_agreement
from polymoe.problem.call import device_name
from polymoe.problem.tensors import ExpertsSpec

RESERVED = "reserved"

log = getLogger("polymoe")


def _share(model: Any, experts: Any) -> tuple[dict[str, Any], Any]:
    """Which part of an experts module this rank has, as arguments of ``load_experts``, and the ranks that share it.

    Transformers adds up the ranks' results where its plan says so. Elsewhere each rank has all experts.
    """
    if not getattr(experts, "_is_hooked", False):
        return {}, None
    way = "ep" if model.config.distributed_config.ep_size > 1 else "tp"
    mesh = model._mesh_manager.get_mesh(way)
    return {way: (mesh.get_local_rank(), mesh.size())}, mesh.get_group()


def _require_whole_heads(model: Any, split: Any) -> None:
    """Check that tensor parallelism does not cut heads of attention: only ``forward`` would fail, about a shape."""
    plan, *_ = model._resolve_parallel_plans(split)
    for name, style in plan.items():
        block, _, projection = name.rpartition(".")
        if style != "colwise" or projection not in ("q_proj", "k_proj", "v_proj"):
            continue
        size = getattr(model.get_submodule(block), "head_dim", None)
        if isinstance(size, int) and (heads := model.get_submodule(name).out_features // size) % split.tp_size:
            raise UnsupportedProblem(
                name,
                expected=f"a number of heads that divides by tp_size={split.tp_size}",
                got=f"{heads} of {size} features",
                hint='choose another tp_size; device_map="auto" distributes whole layers over several GPUs',
            )


@contextmanager
def _agreeing(group: Any, where: str) -> Iterator[None]:
    """Tell the ranks that wait for this one that it cannot load its experts."""
    try:
        yield
    except PolymoeError:
        if group is not None:
            require_agreement(None, group, where)
        raise


class PackedConfig(QuantizationConfigMixin):
    """The quantization config of a model with packed experts: the checkpoint's own, and how to pack.

    Args:
        source: the checkpoint's ``quantization_config``, wherever it was found.
        checkpoint: the open checkpoint; None is that of the files that Transformers has found.
        backend, role: as in :func:`polymoe.load_experts`.
        device: where the experts are packed; None is the device of their layer.
        expert_memory, experts: as for :func:`polymoe.load`.
        dense: what other quantized matrices become, one of :data:`~polymoe.engines.transformers.dense_quantizer.DENSE`.
    """

    def __init__(
        self,
        source: dict[str, Any],
        *,
        checkpoint: Checkpoint | None = None,
        backend: str = "auto",
        role: str = "mixed",
        device: str | None = None,
        dense: str = "16bit",
        expert_memory: str | None = None,
        experts: str | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = INTERFACE_NAME  # type: ignore[assignment]
        self.source, self.checkpoint, self.backend, self.role = source, checkpoint, backend, role
        self.device, self.dense, self.expert_memory, self.experts = device, dense, expert_memory, experts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "checkpoint": None}  # whose open files cannot be saved

    def __deepcopy__(self, memo: Any) -> PackedConfig:
        copied = copy.copy(self)
        copied.source, copied.checkpoint = copy.deepcopy(self.source, memo), self.checkpoint
        return copied

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own ``quantization_config``."""
        return dict(self.source)


class PackedQuantizer(HfQuantizer):
    """Replaces experts modules before the weights are loaded, and packs the experts afterwards."""

    quantization_config: PackedConfig

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # type: ignore[arg-type]
        self.checkpoint: Checkpoint | None = None
        self.dense_tensors: DenseTensors | None = None
        self.dense: HfQuantizer | None = None
        self.experts: dict[str, tuple[int, int]] = {}
        self.slots: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The model is loaded: only loading reads the checkpoint, whose open files cannot be saved.
        return {**self.__dict__, "checkpoint": None, "dense_tensors": None}

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Does nothing: Transformers would replace experts modules here, and they are replaced already."""

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        given = self.quantization_config.checkpoint
        if given is None and not checkpoint_files:
            raise ArgumentError("from_pretrained", expected="a checkpoint in files", got="a state dict")
        if kwargs.get("use_kernels"):
            raise ArgumentError(
                "from_pretrained(use_kernels=True)",
                expected="polymoe's experts or the Hub's kernels",
                got="both",
                hint="the Hub's kernel for this layer reads unpacked experts; leave use_kernels out",
            )
        self.checkpoint = given or Checkpoint.open(
            Path(checkpoint_files[0]).parent, experts=self.quantization_config.experts
        )
        family = family_named(self.checkpoint.model_type)
        family.require_dtype(model.dtype)
        self.experts = pack_modules(model, family, self.checkpoint.parts)
        specs = self._specs()
        if (memory := self.quantization_config.expert_memory) is not None:
            self.slots = slots_here(memory, list(specs.values()), max(p.moe.top_k for p in self.checkpoint.parts))
        for name, spec in specs.items():
            # Device maps count this buffer. It takes no memory, and is removed before anything is read.
            reserved = torch.empty(
                spec.local_bytes if self.slots is None else self.slots * spec.expert_bytes,
                dtype=torch.uint8,
                device="meta",
            )
            module = model.get_submodule(name)
            module.register_buffer(RESERVED, reserved, persistent=False)
            split = getattr(model.config, "distributed_config", None)
            module.num_experts = ceil_div(spec.experts, getattr(split, "ep_size", None) or 1)
        if self.quantization_config.dense == "transformers":
            self.dense = dense_quantizer(model, self.quantization_config.source, self.experts, kwargs.get("device_map"))
        watch_loading()

    def _specs(self) -> dict[str, ExpertsSpec]:
        """The experts of each module, by its name."""
        assert self.checkpoint is not None
        return {name: self.checkpoint.parts[part].spec(layer) for name, (part, layer) in self.experts.items()}

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Memory of each device for a device map: with experts in host memory, each GPU has to hold two whole layers
        beside its slots."""
        if self.slots is None:
            return max_memory
        whole = 2 * max(spec.local_bytes for spec in self._specs().values())
        return {place: max(0, size - whole) if isinstance(place, int) else size for place, size in max_memory.items()}

    def read_others(self, model: Any, load_config: Any, tensors: DenseTensors | None = None) -> Mapping[str, Any]:
        """The tensors that Transformers reads instead of the files' own: those given, or all but the experts'."""
        if load_config.device_mesh is not None:
            self._require_split(model)
        assert self.checkpoint is not None
        for name in self.experts:
            delattr(model.get_submodule(name), RESERVED)
        self.dense_tensors = tensors or self.checkpoint.dense_tensors(as_stored=self.dense is not None)
        return self.dense_tensors

    def _require_split(self, model: Any) -> None:
        """Check that a model is split in a way that packed experts follow: tensor and expert parallelism."""
        split = getattr(model.config, "distributed_config", None)
        others = [f"{name}={size}" for name in ("pp_size", "dp_size") if (size := getattr(split, name, 1)) > 1]
        got = ", ".join(others)
        if split is None or not hasattr(model, "_mesh_manager"):
            got = f"Transformers {transformers.__version__}, which splits models in another way"
        elif self.dense is not None:
            got = 'dense="transformers"'
        if got:
            raise UnsupportedProblem(
                "packed experts of a model that is split",
                expected="tensor or expert parallelism, and 16-bit matrices outside the experts",
                got=got,
                hint='device_map="auto" distributes layers over several GPUs',
            )
        _require_whole_heads(model, split)

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:  # type: ignore[override]
        """Conversions of tensor names, by Transformers' own quantizer if there is one for dense matrices."""
        return (self.dense or super()).update_weight_conversions(weight_conversions, *args)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element, for device maps."""
        return (self.dense or super()).param_element_size(model, param_name, param)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if self.checkpoint is None or self.dense_tensors is None:
            raise UnsupportedProblem(
                f"Transformers {transformers.__version__}",
                expected="weights loaded by _load_pretrained_model",
                got="another way",
                hint="polymoe is tested with 5.17 to 5.23",
            )
        config = self.quantization_config
        machines: dict[torch.device, Machine] = {}
        for name, (part, layer) in logging.tqdm(self.experts.items(), desc="Loading experts"):
            sibling = next(model.get_submodule(name.rpartition(".")[0]).parameters())
            device = torch.device(config.device) if config.device else sibling.device
            if device.type == "meta":
                instead = '; expert_memory="32slots" keeps experts in host memory' if self.slots is None else ""
                raise UnsupportedProblem(
                    name,
                    expected="a layer on a device",
                    got="a layer offloaded to CPU or disk",
                    hint="give a device_map without offloading" + instead,
                )
            if device not in machines:  # one answer for all layers, before the first takes memory
                machines[device] = Machine.of(device_name(device)).shared_by(len(self.experts))
            module = model.get_submodule(name)
            share, group = _share(model, module)
            module.plain = PlainExperts.of(self.checkpoint.parts[part], layer)
            with _agreeing(group, name):
                module.fused = load_experts(
                    self.checkpoint.parts[part],
                    layer,
                    device=device,
                    machine=machines[device],
                    backend=config.backend,
                    role=config.role,
                    dtype=model.dtype,
                    slots=self.slots,
                    **share,
                )
            if group is not None:
                require_agreement(module.fused.explain(), group, name, slots=self.slots)
        if self.dense is not None:
            self.dense._process_model_after_weight_loading(model)
        self._report_dequantized(model.dtype)

    def _report_dequantized(self, dtype: torch.dtype) -> None:
        assert self.checkpoint is not None
        assert self.dense_tensors is not None
        read = self.dense_tensors.matrices_read
        if not read:
            return
        stored = ", ".join(sorted({m.encoding.name for m in read}))
        bytes_stored, bytes_here = sum(m.nbytes for m in read), sum(m.numel for m in read) * dtype.itemsize
        log.warning(
            "%s: %d matrices outside the experts are stored as %s and run as %s: %.1f MiB stored, %.1f MiB in memory",
            self.checkpoint.name,
            len(read),
            stored,
            str(dtype).removeprefix("torch."),
            bytes_stored / 2**20,
            bytes_here / 2**20,
        )
        different = [m for m in read if not m.as_configured]
        if different:
            first = different[0]
            warnings.warn(
                f"{self.checkpoint.name}: {len(different)} matrices outside the experts differ from the config, "
                f"such as {first.module}: config: {first.configured}; tensors: {first.encoding.name}. "
                "The tensors take precedence.",
                stacklevel=2,
            )

    def is_serializable(self) -> bool:  # type: ignore[override]
        """Refuse to save: a packed model has no expert tensors.

        Raises:
            UnsupportedProblem: always.
        """
        where = self.checkpoint.name if self.checkpoint else "the checkpoint"
        raise UnsupportedProblem(
            "save_pretrained",
            expected="a model with plain experts",
            got="packed experts",
            hint=f"copy {where} instead: its experts are unchanged",
        )

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether ``generate`` may compile decoding, as it does for a static cache on a GPU: unless Transformers'
        quantizer for dense matrices says no."""
        return self.dense is None or self.dense.is_compileable

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        """False: packed experts have no gradient."""
        return False
