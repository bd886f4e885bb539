"""Routers: from logits to the experts of each token and their weights; one frozen value for each kind of router.

Every router works in three steps, in float32; routers differ in the details of each step::

    scores_TE  = score(logits_TE)
    ids_TA     = the top_k of scores_TE + correction_bias_E, or a table's entry for the token
    weights_TA = weigh(scores_TE at ids_TA)          # the bias affects the choice, never the weights

Example::

    router = SigmoidTopK(8, n_group=8, topk_group=4, scaling=2.5)           # DeepSeek-V3
    topk_ids_TA, topk_weights_TA = router(logits_TE, correction_bias_E=bias_E)

================================== ================================================
router                             models
================================== ================================================
``TopKSoftmax``                    gpt-oss
``SoftmaxTopK``                    Qwen3-MoE, Mixtral
``SigmoidTopK``                    DeepSeek-V3, Kimi-K2, GLM-4.5 to 4.7, Nemotron-3
``SqrtSoftplusTopK``, ``HashTopK`` DeepSeek-V4
``SigmoidInput``                   Llama-4
================================== ================================================

The matrix product that computes the logits stays in the model. On a GPU no call reads values back to the host, so every
router can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-20  # added to the divisor of sigmoid and sqrt-softplus weights
HINTS_MISSING = {
    "correction_bias_E": "the checkpoint stores it beside the router's weight; pass zeros for a model without one",
    "tid2eid_VA": "the checkpoint stores it beside the router's weight",
}


class Routing(NamedTuple):
    """The experts of each token and their weights: ``experts(x_TH, *routing)``.

    Attributes:
        topk_ids_TA: int64, the experts of each token, best first (in the table's order where a table chooses).
        topk_weights_TA: float32, their weights, including the routed scaling factor.
    """

    topk_ids_TA: Tensor
    topk_weights_TA: Tensor


@dataclass(frozen=True, slots=True)
class _Router(ABC):
    """The three steps and the checks that all routers share."""

    top_k: int

    weight_on: ClassVar[Literal["output", "input"]] = "output"
    uses_correction_bias: ClassVar[bool] = False
    uses_token_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.type == "bool":  # a string, by the import of annotations
                wanted, fits = "true or false", isinstance(value, bool)
            elif field.type == "int":
                wanted, fits = "a positive integer", type(value) is int and value >= 1
            else:
                wanted, fits = "a finite number above 0", type(value) in (int, float) and 0 < value < math.inf
            if not fits:
                raise ArgumentError(f"{type(self).__name__}.{field.name}", expected=wanted, got=repr(value))

    def __call__(
        self,
        logits_TE: Tensor,
        *,
        correction_bias_E: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        tid2eid_VA: Tensor | None = None,
    ) -> Routing:
        """Choose the experts of each token and compute their weights.

        Args:
            logits_TE: the router's output, any floating dtype; a router bias (gpt-oss) is already in it.
            correction_bias_E: float32; required if ``uses_correction_bias``, else not allowed.
            token_ids_T: integers; needed by a token table and ignored by the other routers, so that all layers of a
                model can be called in the same way.
            tid2eid_VA: integers, the experts of each token of the vocabulary; required if ``uses_token_table``, else
                not allowed.

        Raises:
            ArgumentError: if a tensor is missing, unused, or of a wrong shape, dtype or device; if there are fewer
                experts than ``top_k``; on a CPU also for token or expert ids out of range.
        """
        self._check("logits_TE", logits_TE, logits_TE.is_floating_point(), "floats", ("T", "E"), logits_TE.device)
        if logits_TE.shape[1] < self.top_k:
            raise self._error("logits_TE", f"at least top_k={self.top_k} experts", logits_TE)
        scores_TE = self._score(logits_TE.float())
        bias_E = self._expect(self.uses_correction_bias, "correction_bias_E", correction_bias_E)
        table_VA = self._expect(self.uses_token_table, "tid2eid_VA", tid2eid_VA)
        if table_VA is not None:
            ids_TA = self._look_up(logits_TE, token_ids_T, table_VA)
        elif bias_E is not None:
            hint = (
                "its values lie close together (GLM-5.2: 6.817 to 7.063): in 16 bits so few distinct ones are left "
                "that most tokens change experts; keep it out of a model-wide .to(dtype)"
            )
            is_fp32 = bias_E.dtype == torch.float32
            self._check("correction_bias_E", bias_E, is_fp32, "float32", logits_TE.shape[1:], logits_TE.device, hint)
            ids_TA = self._choose(scores_TE + bias_E)
        else:
            ids_TA = self._choose(scores_TE)
        return Routing(ids_TA, self._weigh(scores_TE.gather(1, ids_TA)))

    @abstractmethod
    def _score(self, logits_TE: Tensor) -> Tensor: ...

    def _choose(self, scores_TE: Tensor) -> Tensor:
        return scores_TE.topk(self.top_k, dim=-1).indices

    @abstractmethod
    def _weigh(self, chosen_TA: Tensor) -> Tensor: ...

    def _look_up(self, logits_TE: Tensor, token_ids_T: Tensor | None, table_VA: Tensor) -> Tensor:
        tokens, experts = logits_TE.shape
        if token_ids_T is None:
            raise self._error("token_ids_T", "a tensor", None, "they choose the experts")
        integers, device = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64), logits_TE.device
        self._check("tid2eid_VA", table_VA, table_VA.dtype in integers, "integers", ("V", self.top_k), device)
        self._check("token_ids_T", token_ids_T, token_ids_T.dtype in integers, "integers", (tokens,), device)
        self._check_range("token_ids_T", token_ids_T, table_VA.shape[0])
        ids_TA = table_VA[token_ids_T.long()].long()
        self._check_range("tid2eid_VA", ids_TA, experts)
        return ids_TA

    def _expect(self, used: bool, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return ``tensor``; raises if it is missing or unused, since both silently give wrong experts."""
        if used and tensor is None:
            raise self._error(name, "a tensor", None, HINTS_MISSING[name])
        if tensor is not None and not used:
            raise self._error(name, "None", tensor, "this router does not use it; the model may need another router")
        return tensor

    def _check(
        self,
        name: str,
        tensor: Tensor,
        dtype_fits: bool,
        dtype: str,
        shape: tuple[int | str, ...],
        device: torch.device,
        dtype_hint: str | None = None,
    ) -> None:
        """Raise unless ``tensor`` has the dtype, device and shape; a letter in the shape stands for any size."""
        shape_fits = tensor.dim() == len(shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        if not (dtype_fits and shape_fits and tensor.device == device):
            sizes = ", ".join(str(size) for size in shape)
            expected = f"{dtype} of shape [{sizes}] on {device}"
            raise self._error(name, expected, tensor, None if dtype_fits else dtype_hint)

    def _check_range(self, name: str, ids: Tensor, bound: int) -> None:
        # On a GPU the check would synchronize at every layer of every step.
        if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= bound)).any()):
            raise self._error(name, f"ids from 0 to {bound - 1}", f"{int(ids.min())} to {int(ids.max())}")

    def _error(self, name: str, wanted: str, got: Tensor | str | None, hint: str | None = None) -> ArgumentError:
        if isinstance(got, torch.Tensor):
            got = f"{str(got.dtype).removeprefix('torch.')} of shape {list(got.shape)} on {got.device}"
        return ArgumentError(f"{type(self).__name__} {name}", expected=wanted, got=str(got), hint=hint)


@dataclass(frozen=True, slots=True)
class TopKSoftmax(_Router):
    """Top-k of the raw logits, then a softmax over the chosen ones only: ``softmax(logits[ids])``.

    Models: gpt-oss (arXiv:2508.10925); its router's bias is part of the logits.
    """

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE

    def _weigh(self, chosen_TA: Tensor) -> Tensor:
        return chosen_TA.softmax(-1)


@dataclass(frozen=True, slots=True)
class SoftmaxTopK(_Router):
    """Softmax over all experts, then top-k: ``p = softmax(logits)``, weights ``p[ids]``.

    With ``renormalize`` they are divided by their sum. Models: Qwen3-MoE (arXiv:2505.09388; ``renormalize`` is its
    config's ``norm_topk_prob``), Mixtral (arXiv:2401.04088; always renormalized).
    """

    renormalize: bool

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)

    def _weigh(self, chosen_TA: Tensor) -> Tensor:
        return chosen_TA / chosen_TA.sum(-1, keepdim=True) if self.renormalize else chosen_TA


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled(_Router):
    """Weights ``p[ids]``, with ``renormalize`` divided by ``sum + 1e-20``, times ``scaling``."""

    renormalize: bool = True
    scaling: float = 1.0

    def _weigh(self, chosen_TA: Tensor) -> Tensor:
        if self.renormalize:
            chosen_TA = chosen_TA / (chosen_TA.sum(-1, keepdim=True) + EPSILON)
        return chosen_TA * self.scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidTopK(_Scaled):
    """Sigmoid scores, chosen with a correction bias inside the best groups of experts.

    ``p = sigmoid(logits)`` and ``q = p + correction_bias``. The experts form ``n_group`` equal groups of neighbours;
    a group's score is the sum of its two largest ``q``. ``ids`` are the top-k of ``q`` within the ``topk_group`` best
    groups. Weights are ``p[ids]``, with ``renormalize`` divided by ``sum + 1e-20``, times ``scaling``. With as many
    groups kept as there are, groups have no effect.

    The logits should be a float32 product of the router's weight and input. Models: DeepSeek-V3 (arXiv:2412.19437,
    bias after arXiv:2408.15664), and with one group Kimi-K2, GLM-4.5 to 4.7 and Nemotron-3.
    """

    n_group: int = 1
    topk_group: int = 1

    uses_correction_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _Scaled.__post_init__(self)
        if self.topk_group > self.n_group:
            raise ArgumentError(
                "SigmoidTopK.topk_group", expected=f"at most n_group={self.n_group}", got=str(self.topk_group)
            )

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def _choose(self, scores_TE: Tensor) -> Tensor:
        return _Scaled._choose(self, self._mask_groups(scores_TE) if self.topk_group < self.n_group else scores_TE)

    def _mask_groups(self, scores_TE: Tensor) -> Tensor:
        """Set scores outside the best groups to -inf, not 0: a bias can make the score of a kept expert negative."""
        tokens, experts = scores_TE.shape
        size = experts // self.n_group
        if experts % self.n_group or size < 2 or self.topk_group * size < self.top_k:
            wanted = (
                f"n_group={self.n_group} equal groups of at least 2 experts, and at least top_k={self.top_k} experts "
                f"in topk_group={self.topk_group} of them"
            )
            raise self._error("logits_TE", wanted, scores_TE)
        grouped = scores_TE.view(tokens, self.n_group, size)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        kept = torch.zeros(tokens, self.n_group, dtype=torch.bool, device=scores_TE.device).scatter(1, best, True)
        return grouped.masked_fill(~kept[:, :, None], -math.inf).view(tokens, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqrtSoftplusTopK(_Scaled):
    """Square root of softplus as score, chosen with a correction bias among all experts.

    ``p = sqrt(log(1 + exp(logits)))``; ``ids`` are the top-k of ``p + correction_bias``, never limited to groups.
    Weights are ``p[ids]``, with ``renormalize`` divided by ``sum + 1e-20``, times ``scaling``.

    Models: DeepSeek-V4, all expert layers but its first few.
    """

    uses_correction_bias: ClassVar[bool] = True

    def _score(self, logits_TE: Tensor) -> Tensor:
        return torch.nn.functional.softplus(logits_TE).sqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class HashTopK(_Scaled):
    """Experts by token id: ``ids = tid2eid[token_id]``; logits give only the weights, as in :class:`SqrtSoftplusTopK`.

    Models: the first ``num_hash_layers`` expert layers of DeepSeek-V4. The idea: Roller et al., arXiv:2106.04426.
    """

    uses_token_table: ClassVar[bool] = True

    def _score(self, logits_TE: Tensor) -> Tensor:
        return torch.nn.functional.softplus(logits_TE).sqrt()


@dataclass(frozen=True, slots=True)
class SigmoidInput(_Router):
    """Top-k of the raw logits, weights ``sigmoid(logits[ids])``, multiplied into the expert's input: ``f(w * x)``.

    Experts are not linear, so weighting the output would be another function. Models: Llama-4, one expert per token.
    """

    top_k: int = 1

    weight_on: ClassVar[Literal["output", "input"]] = "input"

    def _score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE

    def _weigh(self, chosen_TA: Tensor) -> Tensor:
        return chosen_TA.sigmoid()


Router = TopKSoftmax | SoftmaxTopK | SigmoidTopK | SqrtSoftplusTopK | HashTopK | SigmoidInput
"""Any router. ``weight_on`` tells whether its weights multiply an expert's output or its input."""
