"""Accuracy of a served model: a file of questions, an interval, and the answers that were wrong.

Needs the extras serve and eval. With another server, pass its address to `Server`; `polymoe eval` does the same.
"""

import tempfile
from pathlib import Path

from serve_and_ask import KEY, running_server

from polymoe.evaluate import Server, evaluate, read_records


def main():
    """Ask forty sums."""
    with running_server("models/sums-gpt-oss-mxfp4") as url, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.jsonl"  # kept, an interrupted run continues from it
        run = evaluate("models/sums-heldout.jsonl", server=Server(url=url, api_key=KEY), limit=40, out=out)
        score = run.score
        interval = f"95 % interval {score.low:.1%} to {score.high:.1%}"
        print(f"{score.questions} questions, {score.pass_at_1:.1%} right, {interval}")
        _, records = read_records(out)
        for record in records:
            if not record.correct:
                print(f"{record.id}: expected {record.expected}, got {record.answer}")


if __name__ == "__main__":
    main()
