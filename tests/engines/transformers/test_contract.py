"""The contract with Transformers: the list of private parts is complete, true, and checked before a model is loaded."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polymoe

pytest.importorskip("transformers")

import transformers

from polymoe.checkpoint.architectures.interface import require_experts
from polymoe.engines.hooks import Hook
from polymoe.engines.transformers import contract, install, load
from polymoe.engines.transformers.contract import HOOKS, checked_call, require_contract
from polymoe.engines.transformers.families import TRANSFORMERS_FAMILIES, PackedExperts, TransformersFamily, pack_modules
from polymoe.errors import UnsupportedProblem
from polymoe.serve.shared_sampling import HOOKS as SHARED_SAMPLING
from support.packed_model import CHECKPOINT
from support.tiny_models import KNOWS_CONVERSIONS

ROOT = Path(polymoe.__file__).parent

SERVER = SHARED_SAMPLING
"""What only ``polymoe serve`` uses."""

OTHERS = (
    Hook("transformers.integrations.finegrained_fp8", "load_finegrained_fp8_kernel()"),
    Hook("transformers.integrations.hub_kernels", "lazy_load_kernel(kernel_name)"),
    Hook("transformers.utils.logging", "set_verbosity_error()"),
    Hook("transformers.cli.serving.utils", "build_response_parser(processor, model, input_ids)"),
    Hook("transformers.cli.serving.utils", "get_response_template(processor, model)"),
    Hook("transformers.cli.serving.utils", "response_events_to_chunks(events)"),
    Hook("transformers.cli.serving.utils", "ReasoningText"),
    Hook("transformers.cli.serving.utils", "ToolCall(name=, arguments=)"),
)
"""What single options use."""

CONVERSIONS = (
    Hook("transformers.initialization", "meta_device_safe_creation_ops()"),
    Hook("transformers.initialization", "no_init_weights()"),
    Hook("transformers.conversion_mapping", "get_model_conversion_mapping(model, add_legacy=)"),
    Hook("transformers.core_model_loading", "PrefixChange"),
    Hook("transformers.core_model_loading", "WeightConverter.convert(self, layer_name, model=, config=)"),
    Hook("transformers.core_model_loading", "WeightRenaming.reverse_transform(self)"),
    Hook("transformers.core_model_loading", "apply_converters(source_key, weight_converters)"),
    Hook("transformers.core_model_loading", "apply_renamings(source_key, weight_renamings)"),
    Hook("transformers.core_model_loading", "dot_natural_key(s)"),
    Hook(
        "transformers.core_model_loading",
        "rename_source_key(source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict)",
    ),
)
"""What models without a row in a table of families use, from Transformers 5.23 on."""

ATTRIBUTES = {
    "_apply_gate": "of experts modules, set by use_experts_implementation",
    "_attn_implementation": "of a config, only for records",
    "_cb_config": "of CBGenerateManager",
    "_continuous_batching": "of GenerationState",
    "_keys_to_ignore_on_load_unexpected": "of a model, what its checkpoints may have besides",
    "_is_hf_initialized": "of modules that are not to be initialized",
    "_is_hooked": "of modules that Transformers splits",
    "_mesh_manager": "of models that Transformers splits",
    "_resolve_parallel_plans": "of models that Transformers splits",
    "_non_streaming": "of the server's handlers",
    "_create_batch_processor": "of the manager of continuous batching",
    "_supports_attention_backend": "of a model, by getattr with a default",
}
"""Private attributes of objects, which have no path of their own; what they do is in the tests of their modules."""

NOT_THEIRS = {"_buffers", "_dynamo", "_flash_attention_forward", "_unset_keepalive_if_required"}  # of torch, uvicorn


@pytest.mark.parametrize("part", [*HOOKS, *SERVER, *OTHERS, *CONVERSIONS], ids=str)
def test_the_installed_version_keeps_to_it(part: Hook) -> None:
    if part in SERVER:
        pytest.importorskip("openai")
    if part in CONVERSIONS and not KNOWS_CONVERSIONS:
        pytest.skip("Transformers before 5.23")
    assert part.difference() is None


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_every_import_from_within_transformers_is_listed() -> None:
    listed = [part.path for part in (*HOOKS, *SERVER, *OTHERS, *CONVERSIONS)]
    missing = []
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                missing += [n for n in names if not any(f"{p}.".startswith(f"{n}.") for p in listed)]
    assert not missing, f"not in contract.HOOKS: {missing}"


def test_every_private_attribute_is_listed() -> None:
    own: set[str] = set()
    used: dict[str, str] = {}
    for path, tree in trees():
        theirs = path.is_relative_to(ROOT / "engines" / "transformers") or path.is_relative_to(ROOT / "serve")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
                elif theirs:
                    used[node.attr] = str(path.relative_to(ROOT))
    listed = {name for part in (*HOOKS, *SERVER) for name in part.path.split(".")} | ATTRIBUTES.keys() | NOT_THEIRS
    assert {name: place for name, place in used.items() if name not in own | listed} == {}


def overriding() -> list[tuple[type, str]]:
    """Our classes that derive from Transformers' own, with each method that replaces one of theirs."""
    from polymoe.engines.transformers import quantizer

    kinds = [quantizer.PackedQuantizer, quantizer.PackedConfig]
    try:
        from polymoe.serve import app, continuous_batching, sequential
    except ImportError:
        pass
    else:
        for module in (app, continuous_batching, sequential):
            kinds += [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    return [
        (kind, name)
        for kind in kinds
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name != "__init__" and _theirs(kind, name) is not None
    ]


def _theirs(kind: type, name: str) -> Any:
    bases = (base for base in kind.__mro__[1:] if base.__module__.startswith("transformers."))
    return next((vars(base)[name] for base in bases if inspect.isfunction(vars(base).get(name))), None)


@pytest.mark.parametrize(("kind", "name"), overriding(), ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_methods_take_what_transformers_hands_over(kind: type, name: str) -> None:
    given = [p for p in inspect.signature(_theirs(kind, name)).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    inspect.signature(vars(kind)[name]).bind(*(p.name for p in given))


@pytest.mark.parametrize("family", [row for row in TRANSFORMERS_FAMILIES if row.module], ids=lambda f: f.model_type)
def test_blocks_of_families_with_a_class_of_their_own_are_called_in_the_known_way(family: Any) -> None:
    import importlib

    name = family.model_type.removesuffix("_text")
    kind = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), family.module)
    assert list(inspect.signature(kind.forward).parameters) == ["self", "hidden_states"]


# --- What another version is refused for ----------------------------------------------------------------------------


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Another version of Transformers."""
    contract._difference.cache_clear()
    yield monkeypatch
    contract._difference.cache_clear()


def test_a_part_with_another_signature_is_refused_by_name(other: pytest.MonkeyPatch) -> None:
    def load_weights(model: Any, plan: Any) -> None: ...

    other.setattr(transformers.PreTrainedModel, "_load_pretrained_model", staticmethod(load_weights))
    message = (
        r"Transformers 5\.\d+\.\d+: expected transformers\.modeling_utils\.PreTrainedModel\._load_pretrained_model"
        r"\(model, state_dict, checkpoint_files, load_config\), got .*\(model: .*, plan: .*\)(?s:.*)up to 5\.23"
    )
    for call in (require_contract, install, lambda: load(CHECKPOINT)):
        with pytest.raises(UnsupportedProblem, match=message):
            call()


def test_a_part_that_is_gone_is_refused_by_name(other: pytest.MonkeyPatch) -> None:
    other.delattr("transformers.quantizers.base.HfQuantizer.is_trainable")
    with pytest.raises(UnsupportedProblem, match=r"HfQuantizer\.is_trainable, got none"):
        require_contract()


def test_a_part_that_needs_more_is_refused(other: pytest.MonkeyPatch) -> None:
    def convert(self: Any, model: Any, plan: Any) -> None: ...

    other.setattr("transformers.quantizers.base.HfQuantizer._convert_model_for_quantization", convert)
    with pytest.raises(UnsupportedProblem, match="_convert_model_for_quantization"):
        require_contract()


def test_a_newer_version_is_used_with_one_warning(other: pytest.MonkeyPatch) -> None:
    # Not of sys.modules: importing PEFT can replace the lazy module there.
    other.setattr(contract.transformers, "__version__", "5.24.0")
    with pytest.warns(
        UserWarning, match=r"Transformers 5\.24\.0 is newer than 5\.23, the newest that polymoe is tested"
    ):
        require_contract()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_contract()


X, IDS, WEIGHTS = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.bfloat16)


def test_a_call_as_it_is_known() -> None:
    x, ids, weights = checked_call("Experts", (X, IDS, WEIGHTS), {})
    assert x is X
    assert ids is IDS
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("args", "others", "got"),
    [
        ((X, WEIGHTS, IDS), {}, r"\(float32 \[4, 8\], bfloat16 \[4, 2\], int64 \[4, 2\]\)"),
        ((IDS, WEIGHTS, X), {}, r"\(int64 \[4, 2\], "),
        ((X, IDS), {}, r"\(float32 \[4, 8\], int64 \[4, 2\]\)"),
        ((X, IDS, WEIGHTS, X), {}, "float32"),
        ((X, IDS, WEIGHTS), {"scales": X}, r"scales=float32 \[4, 8\]"),
        ((X.to(torch.float8_e4m3fn), IDS, WEIGHTS), {}, "float8_e4m3fn"),
        ((X.double(), IDS, WEIGHTS), {}, "float64"),
        ((X, IDS.to(torch.uint8), WEIGHTS), {}, "uint8"),
        ((X, IDS.bool(), WEIGHTS), {}, "bool"),
        ((X, IDS, WEIGHTS.double()), {}, "float64"),
        ((X, IDS, WEIGHTS[:, :1]), {}, r"bfloat16 \[4, 1\]"),
        ((X[None], IDS, WEIGHTS), {}, r"float32 \[1, 4, 8\]"),
        ((X, IDS[:, 0], WEIGHTS[:, 0]), {}, r"int64 \[4\]"),
        ((X, IDS, None), {}, "NoneType"),
    ],
)
def test_other_arguments_or_another_order_are_refused_by_name(args: Any, others: Any, got: str) -> None:
    message = rf"Transformers .*: expected Experts\(x \[T, H\].*, got .*{got}"
    with pytest.raises(UnsupportedProblem, match=message):
        checked_call("Experts", args, others)
    packed = PackedExperts()
    packed.fused = lambda *_: pytest.fail("called")  # type: ignore[assignment]
    with pytest.raises(UnsupportedProblem, match="expected PackedExperts"):
        packed(*args, **others)


class ScaledExperts(nn.Module):
    """As a future version may call them."""

    has_gate, is_transposed, has_bias = True, False, False

    def forward(self, hidden_states: Any, top_k_weights: Any, top_k_index: Any) -> None: ...


def test_experts_of_another_order_are_refused_when_they_would_be_packed() -> None:
    message = (
        r"expected ScaledExperts\.forward\(hidden_states, top_k_index, top_k_weights\), got \(hidden_states, top_k_w"
    )
    with pytest.raises(UnsupportedProblem, match=message):
        require_experts(ScaledExperts)
    model = nn.ModuleDict({"layers": nn.ModuleList([ScaledExperts()])})
    with pytest.raises(UnsupportedProblem, match=message):
        pack_modules(model, TransformersFamily("future"), ())
    assert isinstance(model["layers"][0], ScaledExperts)  # type: ignore[index]
