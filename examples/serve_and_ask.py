"""A server with packed experts, and OpenAI's client: answers at once, streamed, and the server's metrics.

Needs the extra serve. Any client of OpenAI's API works; the server could as well be started in another terminal.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

import openai

KEY = "a-long-secret"


@contextlib.contextmanager
def running_server(model):
    """Start ``polymoe serve`` in a process of its own, wait until it answers, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "polymoe", "serve", model, "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, env={**os.environ, "POLYMOE_API_KEY": KEY}, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                if server.poll() is not None:
                    raise SystemExit(f"the server ended: {' '.join(command)}")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def main():
    """Ask three questions."""
    with running_server("models/sums-gpt-oss-mxfp4") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        (model,) = client.models.list()

        completion = client.completions.create(model=model.id, prompt="498-971=", max_tokens=16)
        print("498-971=", completion.choices[0].text)

        question = [{"role": "user", "content": "123+456="}]
        stream = client.chat.completions.create(model=model.id, messages=question, max_tokens=16, stream=True)
        print("123+456=", "".join(part.choices[0].delta.content or "" for part in stream))

        metrics = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(metrics) as reply:
            lines = reply.read().decode().splitlines()
        print(*(line for line in lines if line.startswith("polymoe_generation_tokens_total")), sep="\n")


if __name__ == "__main__":
    main()
