"""Hugging Face's ``finegrained-fp8``, a kernel of its Hub that Transformers can use for experts. Calls are those of its
version 4: both products, the activation, and the weighted sum in one function.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks, peer_problem
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import FP8_GROUP128, MXFP8
from polymoe.problem.verdict import Reason


@dataclass(frozen=True, slots=True)
class FinegrainedFp8:
    """The faster one of its two functions for each number of tokens: experts as batches of rows, or one row at a time.

    Transformers leaves that choice to its user (``experts_implementation``). Each measures dozens of configurations for
    each number of tokens. So batches are tried from half a row an expert on, and single rows, each of which reads
    its expert's weights, up to four rows an expert.
    """

    name: str = "finegrained"
    package: str = "kernels"
    compiles_at_once: bool = False

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against the problem."""
        return peer_problem(problem, {"fp8_block128": (FP8_GROUP128,), "mxfp4": (MXFP8,), "mxfp8": (MXFP8,)})

    def prepare(self, problem: Problem, stacks: Stacks) -> PeerCall:
        """Return the call; weights stay as they are. Its kernels are compiled and tuned at the first call."""
        from triton.testing import do_bench

        from kernels import get_kernel

        library = get_kernel("kernels-community/finegrained-fp8", version=4)
        up, down = stacks.gate_up, stacks.down
        blocks = [128, 128] if problem.spec.format == "fp8_block128" else None
        scales = [p["scales"].float() if blocks else p["scales"] for p in (up, down)]
        experts = problem.spec.local_experts
        fastest: dict[int, Callable[..., Tensor]] = {}

        def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor:
            given = (x_TH, ids_TA, weights_TA, up["codes"], down["codes"], *scales, blocks)
            tokens = len(x_TH)
            if tokens not in fastest:  # before graphs are captured: every size is called once
                single, batches = ids_TA.numel() <= 4 * experts, 2 * ids_TA.numel() >= experts
                functions = [library.moe_fused_batched] * single + [library.moe_fused_grouped] * batches
                fastest[tokens] = min(functions, key=lambda f: do_bench(lambda: f(*given)))  # type: ignore
            return fastest[tokens](*given)

        return call
