"""Write README's table of families from the newest record of each checkpoint in benchmarks/results/.

python models/table.py            # rewrite it
python models/table.py --check    # exit with 1 if it differs from the records
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from families import FAMILIES

from polymoe.common.atomic import replace_file

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
START, END = "<!-- families: written by models/table.py -->", "<!-- end of families -->"


def table() -> str:
    """The table's lines in Markdown."""
    lines = [
        "| family, checkpoint | stored as | experts | in the file, in 16 bit | right, packed | right, dequantized |",
        "|---|---|---|---|---|---|",
    ]
    for make in FAMILIES.values():
        family = make()
        record = json.loads((ROOT / f"benchmarks/results/{family.directory}.jsonl").read_text().splitlines()[-1])
        sizes = [f"{record[key] / 1e6:.1f}" for key in ("experts_bytes", "experts_bytes_16bit")]
        lines.append(
            f"| `{record['family']}` [{family.directory}](models/{family.directory}) | {family.sibling} "
            f"| {record['format'].replace('_', ' ')} | {sizes[0]} MB, {sizes[1]} MB "
            f"| {record['packed']:.1f} % | {record['dequantized']:.1f} % ({record['dequantized_by']}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = README.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    wanted = f"{before}{START}\n{table()}{END}{after}"
    if parser.parse_args().check:
        sys.exit(0 if wanted == text else f"{README} is not what the records say: python models/table.py")
    replace_file(README, wanted)


if __name__ == "__main__":
    main()
