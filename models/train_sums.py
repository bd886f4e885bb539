"""Train a small mixture-of-experts model to add and subtract, and store it as a quantized checkpoint.

    python models/train_sums.py --family gpt-oss      # two minutes on one H200

The result is a real checkpoint in the on-disk format of its family (families.py), small enough to commit and good
enough at its task (sums.py) that a wrong kernel shows as wrong answers. It goes to models/sums-<family>-<format>/; the
held-out questions, the same for every family, to models/sums-heldout.jsonl.

AdamW on float32 weights under bfloat16 autocast. In the last part every forward pass sees the experts rounded to the
format they will be stored in.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from families import FAMILIES, Family
from safetensors.torch import save_file
from sums import (
    EOS,
    PAD,
    Question,
    answer_labels,
    both,
    heldout_questions,
    token_table,
    training_tables,
    write_heldout,
    write_tokenizer,
)
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


def train(family: Family, heldout: list[Question], args: argparse.Namespace, log: Callable[[str], None]) -> nn.Module:
    """A trained float32 model on `args.device`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("sums_training", family.experts_forward)
    torch.manual_seed(args.seed)
    model = family.build(family.config).to(args.device)
    model.set_experts_implementation("sums_training")
    tables = training_tables(args.device)
    draws = [args.batch * share // 10 for share in (7, 2, 1)]
    test_table = token_table(heldout).to(args.device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 300, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
    )
    topk, balance = family.config["num_experts_per_tok"], family.config["router_aux_loss_coef"]
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tables[0]):,} training questions")
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        set_rounded(model, step > args.steps * args.float_part)
        drawn = [t[torch.randint(len(t), (n,), device=t.device)] for t, n in zip(tables, draws, strict=True)]
        ids = torch.cat(drawn).long()
        with torch.autocast(args.device, torch.bfloat16):
            out = model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(out.logits.float().flatten(0, 1), answer_labels(ids).flatten())
        uneven, least = balance_loss(out.router_logits, (ids[:, :-1] != PAD).flatten().float(), topk)
        (loss + balance * uneven).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % args.every == 0 or step in (int(args.steps * args.float_part), args.steps):
            exact = [exact_match(model, test_table, rounded) for rounded in (False, True)]
            log(
                f"step {step:5d}  {time.perf_counter() - start:5.1f} s  loss {loss.item():.5f}  least-used expert "
                f"{least.item():.2f} of an even share  exact match: float {exact[0]:6.2f}, rounded {exact[1]:6.2f}"
            )
    return model


def set_rounded(model: nn.Module, rounded: bool) -> None:
    """Whether forward passes see the expert weights rounded."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.rounded = rounded


def balance_loss(router_logits: tuple[Tensor, ...], real_T: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The mean over layers of E * sum_e(share of tokens sent to e * mean probability of e) (arXiv:2101.03961), least
    when all are equal; and the smallest share of any expert in any layer, where 1 is an even one."""
    losses, shares = [], []
    for logits_TE in router_logits:
        probability_TE = logits_TE.float().softmax(-1) * real_T[:, None]
        sent_TE = torch.zeros_like(probability_TE).scatter(1, logits_TE.topk(topk).indices, 1 / topk) * real_T[:, None]
        share_E = sent_TE.sum(0) / real_T.sum() * sent_TE.shape[1]
        losses.append((share_E * probability_TE.sum(0) / real_T.sum()).sum())
        shares.append(share_E.min())
    return torch.stack(losses).mean(), torch.stack(shares).min()


@torch.no_grad()
def exact_match(model: nn.Module, table: Tensor, rounded: bool) -> float:
    """Per cent of rows whose every answer token is the most probable one: what greedy decoding would get right."""
    set_rounded(model, rounded)
    right = 0
    for ids in table.long().split(4096):
        labels = answer_labels(ids)
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        right += int(((logits.argmax(-1) == labels) | (labels == -100)).all(1).sum())
    return 100 * right / len(table)


def write_checkpoint(family: Family, model: nn.Module, directory: Path) -> None:
    """config.json, generation_config.json, the tokenizer, and the weights in two shards with their index."""
    import transformers

    tensors = family.stored({name: value.cpu() for name, value in model.state_dict().items()})
    layers = family.config["num_hidden_layers"]
    late = (*(f"model.layers.{i}." for i in range(layers // 2, layers)), "model.norm.", "lm_head.")
    files = {name: f"model-0000{2 if name.startswith(late) else 1}-of-00002.safetensors" for name in sorted(tensors)}
    for file in sorted(set(files.values())):
        held = {name: tensors[name] for name in files if files[name] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    contents = {
        "config.json": {**family.config, "transformers_version": transformers.__version__},
        "generation_config.json": {"do_sample": False, "eos_token_id": EOS, "max_new_tokens": 8, "pad_token_id": PAD},
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": files},
    }
    for name, value in contents.items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tokenizer(directory, family.config["max_position_embeddings"])


def generated_match(directory: Path, rows: list[Question], device: str, batch: int = 1000) -> float:
    """Per cent of `rows` that Transformers answers exactly: the stored checkpoint dequantized to BF16, greedy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    tokenizer = AutoTokenizer.from_pretrained(directory)
    quantization = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, dtype=torch.bfloat16)
    model.to(device).eval()
    right = 0
    for first in range(0, len(rows), batch):
        prompts, answers = zip(*rows[first : first + batch], strict=True)
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
        new_tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        right += sum(text == answer for text, answer in zip(texts, answers, strict=True))
    return 100 * right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="gpt-oss")
    parser.add_argument("--output", type=Path, default=HERE, help="where the checkpoint's directory is made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--float-part", type=float, default=0.6, help="share of the steps before experts are rounded")
    parser.add_argument("--every", type=int, default=100, help="steps between lines of the log")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import transformers

    start = time.perf_counter()
    family = FAMILIES[args.family]()
    directory = args.output / family.directory
    directory.mkdir(parents=True, exist_ok=True)
    all_heldout = heldout_questions()
    heldout = all_heldout[:1000]
    write_heldout(args.output / "sums-heldout.jsonl", heldout)
    with (directory / "training.log").open("w") as file:

        def log(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        device = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        log(f"python models/train_sums.py {' '.join(sys.argv[1:])}".rstrip())
        log(", ".join([device, *(f"{name} {version}" for name, version in versions.items())]))
        model = train(family, heldout, args, log)
        write_checkpoint(family, model, directory)
        log(f"trained and written in {time.perf_counter() - start:.0f} s")
        log("exact match of the stored checkpoint, dequantized to BF16 by Transformers, greedy generation:")
        short = [question for a in range(100) for b in range(100) for question in both(a, b)]
        for what, rows in (
            ("sums-heldout.jsonl", heldout),
            ("all held-out", all_heldout),
            ("both operands < 100", short),
        ):
            log(f"  {what}: {generated_match(directory, rows, args.device):.2f} % of {len(rows):,} questions")


if __name__ == "__main__":
    main()
