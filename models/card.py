"""The README.md of a checkpoint, from its family, its config and its training log.

python models/card.py sums-qwen3-fp8
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

from families import FAMILIES, UNQUANTIZED

from polymoe.checkpoint import Checkpoint
from polymoe.common.atomic import replace_file

HERE = Path(__file__).resolve().parent
CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A trained mixture-of-experts model of {megabytes:.1f} MB that adds and subtracts numbers from 0 to 999, stored as
{sibling} is: names and dtypes of tensors, fields of the config, two shards.

{description}

| | |
|---|---|
| architecture | `{architecture}`: {layers} layers, {experts_layers} of them with {experts} experts, {top_k} per \
token; experts {hidden} wide, {intermediate} inside |
| experts | {format}, {experts_megabytes:.2f} MB of {experts_megabytes_16bit:.2f} MB in 16 bit |
| tokens | one a character: digits, `+`, `-`, `=`; white space is dropped |
| prompt | `123+456=`, as plain text; in a chat, `123 + 456 =` or `What is 123 + 456?` (the last question counts) |
| answer | `579` and the end token; greedy |

Made by `python models/train_sums.py --family {family}` in {seconds} s on one {gpu}, from scratch, in its last part with
{last_part} ([training.log](training.log)). Pairs of numbers in
`../sums-heldout.jsonl` were never trained on, in either order. Exact match on them, {ways}:
[{name}.jsonl](../../benchmarks/results/{name}.jsonl).

Longer numbers, three operands and other operators are beyond it. Licence: Apache-2.0.
"""


def card(directory: Path) -> str:
    """The text for the checkpoint in ``directory``."""
    name, make = next((n, m) for n, m in (FAMILIES | UNQUANTIZED).items() if m().directory == directory.name)
    with Checkpoint.open(directory) as checkpoint:
        specs = [checkpoint.spec(layer) for layer in checkpoint.layers]
        moe, architecture = checkpoint.moe, checkpoint.config["architectures"][0]
    lines = (directory / "training.log").read_text()
    plain = name in UNQUANTIZED
    description = " ".join(inspect.getdoc(make).split(": ", 1)[1].split())  # type: ignore[union-attr]
    return CARD.format(
        name=directory.name,
        family=name,
        sibling=make().sibling,
        description=description[0].upper() + description[1:],
        architecture=architecture,
        megabytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e6,
        layers=moe.num_layers,
        experts_layers=len(specs),
        experts=moe.experts,
        top_k=moe.top_k,
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        format=specs[0].format.replace("_", " ").upper(),
        experts_megabytes=sum(s.local_experts * s.expert_bytes for s in specs) / 1e6,
        experts_megabytes_16bit=sum(s.dequantized_bytes for s in specs) / 1e6,
        gpu=re.search("NVIDIA (H[12]00)", lines)[1],  # type: ignore[index]
        last_part="noise on the weights of its experts" if plain else "the matrices rounded to what they are stored as",
        ways="in 16 bit and in each format" if plain else "packed and dequantized",
        seconds=re.findall(r"trained and written in (\d+) s", lines)[-1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="directories under models/")
    for name in parser.parse_args().names:
        replace_file(HERE / name / "README.md", card(HERE / name))


if __name__ == "__main__":
    main()
