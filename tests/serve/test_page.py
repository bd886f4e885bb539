"""The page to chat in, in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright")

from fastapi.testclient import TestClient
from playwright.sync_api import Page, Route, expect, sync_playwright

from polymoe.serve.app import ModelServer
from support.serving import KEY, Running, running_server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Page]:
    """The page, with the key."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(10_000)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{server.url}/")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").blur()
    expect(page.get_by_role("heading")).to_have_text("sums")
    page.get_by_role("button", name="Settings").click()
    yield page
    page.close()
    assert not said


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page: Page) -> Any:
    return page.locator(".message.assistant")


def bodies(page: Page) -> list[Any]:
    """What is sent to the server from now on."""
    sent: list[Any] = []

    def note(route: Route) -> None:
        sent.append(route.request.post_data_json)
        route.continue_()

    page.route("**/v1/chat/completions", note)
    return sent


def test_the_page_needs_no_key_and_asks_for_it(server: Running, browser: Any) -> None:
    page = browser.new_page()
    answer = page.goto(f"{server.url}/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    expect(page.get_by_text("missing or wrong API key")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_focused()
    page.close()


def test_an_answer_arrives_with_its_speed(page: Page) -> None:
    sent = bodies(page)
    send(page, "12+34=")
    expect(answers(page)).to_contain_text("46")
    expect(answers(page)).to_contain_text(re.compile(r"\d+ tokens, \d+\.\d tokens/s"))
    send(page, "1+2=")
    expect(answers(page)).to_have_count(2)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert "temperature" not in sent[1]


def test_settings_are_sent(page: Page) -> None:
    sent = bodies(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Add.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Message").fill("1+2=")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert sent[0]["messages"][0] == {"role": "system", "content": "Add."}
    assert sent[0]["temperature"] == 0.5


def test_an_answer_is_stopped_and_the_message_can_be_sent_again(page: Page, server: Running) -> None:
    with server.held():
        send(page, "1+2=")
        server.until(lambda: len(server.served.metrics.in_flight) == 1)
        page.get_by_role("button", name="Stop").click()
        expect(answers(page)).to_contain_text("stopped")
        server.until(lambda: not server.served.metrics.in_flight)
    expect(page.get_by_label("Message")).to_have_value("1+2=")
    page.get_by_role("button", name="Send").click()
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("3")


def test_a_new_chat_ends_the_old_one(page: Page, server: Running) -> None:
    with server.held():
        send(page, "1+2=")
        server.until(lambda: len(server.served.metrics.in_flight) == 1)
        page.get_by_role("button", name="New chat").click()
        server.until(lambda: not server.served.metrics.in_flight)
    expect(page.locator(".message")).to_have_count(0)
    sent = bodies(page)
    send(page, "12+34=")
    expect(answers(page)).to_contain_text("46")
    assert len(sent[0]["messages"]) == 1


def test_a_reload_keeps_the_chat(page: Page, server: Running) -> None:
    send(page, "12+34=")
    expect(answers(page)).to_contain_text("tokens/s")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.reload()
    expect(answers(page)).to_contain_text("46")
    expect(page.get_by_role("heading")).to_have_text("sums")  # with the key
    with server.held():
        send(page, "1+2=")
        server.until(lambda: len(server.served.metrics.in_flight) == 1)
        page.reload()
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_label("Message")).to_have_value("1+2=")


ERRORS = [
    ({"status": 429, "json": {"error": {"message": "try again later"}}}, "try again later"),
    ({"status": 502, "body": "<html>"}, "the server answered 502"),
    ({"body": 'data: {"choices": [{"delta": {"content": "part"}}]}\n\n'}, "the server ended the answer early"),
    ({"body": 'data: {"error": {"message": "it stopped"}}\n\ndata: [DONE]\n\n'}, "it stopped"),
    (None, "the connection to the server was lost"),
]


@pytest.mark.parametrize(("answer", "says"), ERRORS, ids=[says for _, says in ERRORS])
def test_errors_are_shown(page: Page, answer: dict[str, Any] | None, says: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort() if answer is None else route.fulfill(**answer))
    send(page, "1+2=")
    expect(page.locator(".error")).to_have_text(says)
    expect(page.get_by_label("Message")).to_have_value("" if "part" in str(answer) else "1+2=")


def test_what_a_model_says_is_text(page: Page) -> None:
    said = {"content": "<img src=x onerror='document.title=1'>" + "x" * 300}
    deltas = [json.dumps({"choices": [{"delta": delta}]}) for delta in ({"reasoning_content": "so"}, said)]
    events = "".join(f"data: {event}\n\n" for event in (*deltas, "[DONE]"))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events))
    send(page, "1+2=")
    expect(answers(page)).to_contain_text("<img src=x")
    expect(page.get_by_text("Reasoning")).to_be_visible()
    assert page.title() == "sums"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    colours = page.evaluate("(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))")
    text, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours)
    assert (text < 50 and ground > 200) if scheme == "light" else (text > 200 and ground < 50)


def test_the_page_can_be_left_out(server: Running) -> None:
    app = ModelServer(server.model, server.tokenizer, name="sums", page=False).app
    assert TestClient(app).get("/").status_code == 404
