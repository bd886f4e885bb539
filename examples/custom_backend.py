"""A backend of your own: registered, asked for its verdict, checked against the reference at load, and chosen.

This one keeps to few tokens, and multiplies each token with the experts that it chose. A package registers a backend by
an entry point instead; docs/adding-a-backend.md has every method.
"""

from dataclasses import dataclass

import torch

import polymoe
from polymoe.backends import BACKENDS
from polymoe.backends.base import BackendBase, Prediction, RunnerBase
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, SHARDS
from polymoe.backends.reference import run_expert
from polymoe.layouts import LAYOUTS
from polymoe.problem.activations import Activation
from polymoe.problem.verdict import Accepted, Reasons


@dataclass(frozen=True, slots=True)
class TokenByToken(BackendBase):
    """Each token by itself, on a CPU."""

    name: str = "token-by-token"
    layouts: tuple[str, ...] = ("dequantized",)  # which torch reads too, so that one copy serves both

    @property
    def handles(self):
        """Values of the problem's features that it can run; it is never asked about others."""
        return {"activation": ANY, "dtype": ("bf16", "fp16", "fp32"), "spec.bias": ANY, **SHARDS}

    def check(self, problem, machine):
        """Say yes, for up to four tokens, or give every reason against it."""
        reasons = Reasons()
        reasons.need(machine.device.kind == "cpu", "device", "cpu", machine.device.kind)
        return reasons.verdict(Accepted(max_tokens=4))

    def configure(self, problem, machine, tokens):
        """There is nothing to choose."""
        return Config()

    def predict(self, problem, machine, tokens):
        """Few tokens wait for memory, so the time is that of the bytes."""
        return Prediction(cost(problem, machine.device, tokens).memory_us)

    def bind(self, problem, packed):
        """Prepare a layer's calls."""
        return TokenRunner(problem.activation, LAYOUTS[packed.layout].unpack(packed))


@dataclass(frozen=True, slots=True)
class TokenRunner(RunnerBase):
    """One layer's calls."""

    activation: Activation
    weights: polymoe.ExpertWeights

    def run(self, call, config):
        """Write the weighted sums; ids of other ranks' experts add nothing."""
        x_TH, out_TH = call.x_TH, call.out_TH
        first, count = self.weights.spec.first_expert, self.weights.spec.local_experts
        for t, (ids, weights) in enumerate(zip(*call.routing, strict=True)):
            total = torch.zeros(x_TH.shape[1])
            for e, weight in zip((ids - first).tolist(), weights.float(), strict=True):
                if 0 <= e < count:
                    total += weight * run_expert(self.weights.expert(e), x_TH[t : t + 1].float(), self.activation)[0]
            out_TH[t] = total


BACKENDS["token-by-token"] = TokenByToken()

for device in ("cpu", "h200"):
    selection = polymoe.explain("models/sums-gpt-oss-mxfp4", device=device).rows[0].selection
    verdict = next(c.verdict for c in selection.candidates if c.backend == "token-by-token")
    print(f"{device}: {'accepts' if isinstance(verdict, Accepted) else '; '.join(map(str, verdict.reasons))}")

# Loading compares it with the reference, and would refuse it if it were wrong.
experts = polymoe.load_experts("models/sums-gpt-oss-mxfp4", layer=1, device="cpu")
print(experts.explain().summary())

call = torch.randn(3, experts.problem.spec.hidden), torch.tensor([[0, 5]] * 3), torch.full((3, 2), 0.5)
reference = polymoe.load_experts("models/sums-gpt-oss-mxfp4", layer=1, device="cpu", backend="reference")
difference = experts(*call) - reference(*call)
print(f"largest difference from the reference: {difference.abs().max():.1e}")
