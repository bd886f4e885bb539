"""Train a small mixture-of-experts model to add and subtract, and store it as a quantized checkpoint.

    python models/train_sums.py --family gpt-oss      # a few minutes on one H200

The result is a real checkpoint in the on-disk format of its family (families.py), small enough to commit and good
enough at its task (sums.py) that a wrong kernel shows as wrong answers. It goes to models/sums-<family>-<format>/; the
held-out questions, the same for every family, to models/sums-heldout.jsonl.

AdamW on float32 weights under bfloat16 autocast. In the last part every forward pass sees the matrices that will be
quantized rounded to their format, or, if nothing is quantized, noise on the experts' weights (rounding.py). On a GPU a
step is captured once and replayed: these models are so small that launching their kernels would take longer than
running them. The learning rate follows the steps or the clock, whichever is further on, so that a run ends in time.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from families import FAMILIES, UNQUANTIZED, TrainedFamily
from rounding import add_rounding, remove_rounding, set_rounded
from store import store
from sums import (
    PAD,
    Question,
    answer_labels,
    heldout_questions,
    token_table,
    training_tables,
    write_heldout,
)
from torch import Tensor, nn

from polymoe.checkpoint.families import text_config

HERE = Path(__file__).resolve().parent
BIAS_RATE = 1e-3  # of the correction bias that balances experts without a loss (arXiv:2408.15664)
REFRESH = 8  # steps between renewals of what rounding adds
WARM_UP = 0.1  # share of the run


def experts_forward(module: Any, x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor) -> Tensor:
    """Every expert on every token, the routing weights (mostly 0) choosing: two matrix products, fast to train."""
    experts = module.num_experts
    weights_TE = topk_weights_TA.new_zeros(len(x_TH), experts).scatter(1, topk_ids_TA, topk_weights_TA).to(x_TH.dtype)
    first, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if module.is_transposed:  # K, the input axis, before N
        first, down = first.mT, down.mT
    bias = getattr(module, "gate_up_proj_bias", None)
    rows_TF = F.linear(x_TH, first.flatten(0, 1), None if bias is None else bias.flatten())
    rows_TEF = rows_TF.unflatten(-1, (experts, -1))
    hidden_TEF = module._apply_gate(rows_TEF) if module.has_gate else module.act_fn(rows_TEF)
    if hasattr(module, "largest_inputs"):
        chosen = (hidden_TEF * (weights_TE[..., None] != 0)).abs().max()
        for name, value in (("gate_up", x_TH.abs().max()), ("down", chosen)):
            module.largest_inputs[name] = max(module.largest_inputs.get(name, 0.0), float(value))
    out_TH = (hidden_TEF * weights_TE[..., None]).flatten(1) @ down.mT.flatten(0, 1)
    return out_TH if bias is None else out_TH + weights_TE @ module.down_proj_bias


class Routers:
    """The routers of a model: what they chose in the last forward pass, and the balance of it."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[tuple[Any, Tensor, Tensor]] = []
        for module in model.modules():
            if type(module).__name__.endswith("Router") and not hasattr(module, "tid2eid"):
                module.register_forward_hook(self._record)

    def _record(self, module: Any, _: Any, output: tuple[Tensor, ...]) -> None:
        if len(output) == 2:  # Llama-4: scores and logits
            self.seen.append((module, output[1], output[1].topk(module.top_k).indices))
        else:
            self.seen.append((module, output[0], output[-1]))

    def balance(self, real_T: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over layers of E * sum_e(share of tokens sent to e * mean probability of e) (arXiv:2101.03961),
        least when all are equal; and the smallest share of any expert in any layer, where 1 is an even one."""
        losses, shares = [], []
        for _, logits_TE, ids_TA in self.seen:
            probability_TE = logits_TE.float().softmax(-1) * real_T[:, None]
            share_E = self._shares(logits_TE, ids_TA, real_T)
            losses.append((share_E * probability_TE.sum(0) / real_T.sum()).sum())
            shares.append(share_E.min())
        return torch.stack(losses).mean(), torch.stack(shares).min()

    @torch.no_grad()
    def correct(self, real_T: Tensor) -> None:
        """Raise the correction bias of experts with less than their share, lower it for those with more."""
        for module, logits_TE, ids_TA in self.seen:
            if hasattr(module, "e_score_correction_bias"):
                share_E = self._shares(logits_TE, ids_TA, real_T)
                module.e_score_correction_bias += BIAS_RATE * torch.sign(1 - share_E)

    @staticmethod
    def _shares(logits_TE: Tensor, ids_TA: Tensor, real_T: Tensor) -> Tensor:
        sent_TE = torch.zeros_like(logits_TE, dtype=torch.float32).scatter(1, ids_TA, 1 / ids_TA.shape[1])
        return (sent_TE * real_T[:, None]).sum(0) / real_T.sum() * logits_TE.shape[1]


class Step:
    """One step of training, on a GPU captured as a graph after some that warm up; holds its loss and balance."""

    def __init__(self, model: Any, family: TrainedFamily, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.routers = Routers(model)
        self.tables = training_tables(args.device)
        self.draws = [args.batch * share // 10 for share in (7, 2, 1)]
        self.balance = text_config(family.config).get("router_aux_loss_coef", 0.0)
        self.on_gpu = on_gpu = args.device == "cuda"
        self.lr = torch.zeros((), device=args.device) if on_gpu else 0.0
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = self.least = torch.zeros(())

    def __call__(self, lr: float) -> None:
        """Take a step at this learning rate."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()

    def capture(self) -> None:
        """Capture the step, which must have been run a few times before in the same stream."""
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self._run()
        self.graph = graph

    def _run(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        drawn = [
            table[torch.randint(len(table), (n,), device=table.device)]
            for table, n in zip(self.tables, self.draws, strict=True)
        ]
        ids = torch.cat(drawn).long()
        self.routers.seen.clear()
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), answer_labels(ids).flatten())
        real_T = (ids[:, :-1] != PAD).flatten().float()
        uneven, self.least = self.routers.balance(real_T)
        (loss + self.balance * uneven).backward()
        self.loss = loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.routers.correct(real_T)
        self.routers.seen.clear()  # and with it the graph of this step


def train(
    family: TrainedFamily, heldout: list[Question], args: argparse.Namespace, log: Callable[[str], None]
) -> nn.Module:
    """A trained float32 model on `args.device`."""
    from transformers import masking_utils
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("sums_training", experts_forward)
    # It checks values of a tensor for several packed texts (never the case here), which a capture forbids.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    torch.manual_seed(args.seed)
    model = family.build().to(args.device)
    model.set_experts_implementation("sums_training")
    add_rounding(model, family)
    step = Step(model, family, args)
    test_table = token_table(heldout).to(args.device)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(step.tables[0]):,} training questions")
    start = time.perf_counter()
    done, rounded, count = 0.0, False, 0
    while done < 1:
        step(args.lr * min(done / WARM_UP + 1e-3, 0.5 + 0.5 * math.cos(math.pi * done)))
        count += 1
        if count == 3 and args.device == "cuda" and not args.eager:
            step.capture()
        if count % 10 == 0 and args.device == "cuda":
            torch.cuda.synchronize()
        done = max(count / args.steps, (time.perf_counter() - start) / args.seconds)
        now_rounded = done > args.float_part
        if now_rounded and (count % REFRESH == 0 or not rounded):
            set_rounded(model, True)
        if count % args.every == 0 or done >= 1 or rounded != now_rounded:
            set_rounded(model, False)
            floats = exact_match(model, test_table)
            set_rounded(model, True)
            rounds = exact_match(model, test_table)
            set_rounded(model, now_rounded)
            log(
                f"step {count:5d}  {time.perf_counter() - start:5.1f} s  loss {step.loss.item():.5f}  "
                f"least-used expert {step.least.item():.2f} of an even share  "
                f"exact match: float {floats:6.2f}, rounded {rounds:6.2f}"
            )
        rounded = now_rounded
    return model


@torch.no_grad()
def exact_match(model: Any, table: Tensor) -> float:
    """Per cent of rows whose every answer token is the most probable one: what greedy decoding would get right."""
    right = 0
    for ids in table.long().split(4096):
        labels = answer_labels(ids)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        right += int(((logits.argmax(-1) == labels) | (labels == -100)).all(1).sum())
    return 100 * right / len(table)


@torch.no_grad()
def largest_inputs(model: Any, table: Tensor) -> dict[str, float]:
    """Largest absolute input of every linear layer and of the experts' projections, as `store` names them."""
    found: dict[str, float] = {}
    handles, experts = [], {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def record(_: Any, args: tuple[Tensor, ...], name: str = name) -> None:
                found[name] = max(found.get(name, 0.0), float(args[0].abs().max()))

            handles.append(module.register_forward_pre_hook(record))
        elif name.endswith(".experts"):
            experts[name.split("layers.")[1].split(".")[0]] = module
            module.largest_inputs = {}
    exact_match(model, table)
    for handle in handles:
        handle.remove()
    for layer, module in experts.items():
        found |= {f"layers.{layer}.experts.{name}": value for name, value in module.largest_inputs.items()}
        del module.largest_inputs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES | UNQUANTIZED), default="gpt-oss")
    parser.add_argument("--output", type=Path, default=HERE, help="where the checkpoint's directory is made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=600, help="most time for the steps")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--float-part", type=float, default=0.6, help="share of the run before weights are rounded")
    parser.add_argument("--every", type=int, default=200, help="steps between lines of the log")
    parser.add_argument("--eager", action="store_true", help="launch every kernel, capture nothing")
    parser.add_argument("--questions", type=int, help="held-out ones of the last measure; all without it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import transformers

    start = time.perf_counter()
    if args.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    family = (FAMILIES | UNQUANTIZED)[args.family]()
    directory = args.output / family.directory
    if directory.exists():
        parser.error(f"{directory} is there already")  # said before the training, not after it
    args.output.mkdir(parents=True, exist_ok=True)
    all_heldout = heldout_questions()
    heldout = all_heldout[:1000]
    write_heldout(args.output / "sums-heldout.jsonl", heldout)
    lines: list[str] = []

    def log(line: str) -> None:
        print(f"{args.family}: {line}", flush=True)
        lines.append(line + "\n")

    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    versions = f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    command = f"--family {args.family} --steps {args.steps} --seconds {args.seconds:g} --batch {args.batch}"
    log(f"python models/train_sums.py {command} --lr {args.lr:g}" + " --eager" * args.eager)
    log(f"{device}, {versions}")
    model = train(family, heldout, args, log)
    set_rounded(model, True)
    asked = all_heldout[: args.questions]
    everything = token_table(asked).to(args.device)
    exact = exact_match(model, everything)
    calibrated = largest_inputs(model, everything[:4096])
    remove_rounding(model)
    store(model.cpu(), family, directory, largest_inputs=calibrated)
    log(
        f"{len(asked):,} of {len(all_heldout):,} held-out questions, "
        f"every token of the answer the most probable: {exact:.2f} %"
    )
    log(f"trained and written in {time.perf_counter() - start:.0f} s")
    (directory / "training.log").write_text("".join(lines))


if __name__ == "__main__":
    main()
