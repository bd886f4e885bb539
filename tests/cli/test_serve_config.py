"""``polymoe serve --config``: options from a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from polymoe import serve as package
from polymoe.cli import serve as verb

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is asked for."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(package, "serve", lambda checkpoint, **given: asked.update(given, checkpoint=checkpoint))
    monkeypatch.setattr(verb, "_exit", lambda code: None)
    return asked


def test_options_come_from_a_file_and_the_command_line(cli: Cli, served: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: some/model\nserved-model-name: sums\nport: 7000\nmax_tokens: 5\ngrace: 1.5\nui: false\n"
        "continuous-batching: true\ncors-origins: [https://a.b, https://c.d]\napi-key: secret\n"
    )
    code, _, err = cli("serve", "--config", str(file), "--port", "0")
    assert code == 0, err
    assert served["checkpoint"] == "some/model"
    assert (served["name"], served["port"], served["max_tokens"], served["grace_s"]) == ("sums", 0, 5, 1.5)
    assert (served["page"], served["continuous_batching"], served["api_key"]) == (False, True, "secret")
    assert served["cors_origins"] == ("https://a.b", "https://c.d")
    file.write_text("no-ui: true\nno_graphs: false\ncontinuous-batching: true\n")
    cli("serve", "some/model", "--config", str(file))
    assert (served["page"], served["graphs"], served["continuous_batching"]) == (False, True, True)
    file.write_text("port: 7000\n")
    cli("serve", "another/model", "--config", str(file))
    assert (served["checkpoint"], served["port"]) == ("another/model", 7000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "got 'prot'\n  hint: did you mean 'port'? known: access-log, "),
        ("help: true", "got 'help'"),
        ("- port", "expected options and their values, such as port: 8000, got list"),
        ("", "got NoneType"),
        ("1: 2", "got dict"),
        ("port: {a: 1}", "port: expected a value, got {'a': 1}"),
        ("no-ui: 1", "no-ui: expected true or false, got 1"),
        ("port:", "port: expected a value, got None"),
        ("port: [", "expected a YAML file, got while parsing"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("port: nonsense", "--port"),
        ("log-level: loud", "--log-level"),
        ("tp: 2", "--tp"),
    ],
)
def test_a_wrong_file_exits_with_2(cli: Cli, served: dict[str, Any], tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    code, out, err = cli("serve", "some/model", "--config", str(file))
    assert (code, out, served) == (2, "", {})
    assert says in err
