"""``polymoe serve``: one model behind an OpenAI-compatible address.

The modules, from the outside in. A request takes this way, and a module imports only from modules below it
(``tests/test_imports.py``):

.. code-block:: text

    lifecycle            builds what follows, runs it until a signal, ends it cleanly
    listener             the socket, and how many connections it may have
    http_server          uvicorn's server, with a limit on log lines (log_limit) and the two that follow:
      connections          which connections may stay, and how long each may take
      http_parser          h11's parser, with limits
    gate                 API key, headers, size and number of requests; watches whether the client is still connected
    summary, activity    what the server says at its start, and logs while it runs
    app                  the endpoints: each request is prepared, its answers are generated and written
    profiling, openapi   two more endpoints, on request; the description of all of them
    prompts              beside the event loop: messages, chat templates, tokens
    messages             the messages of a chat, checked
    generation           what runs a request:
      sequential           one generation after the other
      continuous_batching  shared forward passes, in which shared_sampling chooses the tokens
    call_queue           threads, and what waits for them
    answers              OpenAI's JSON and server-sent events
    choices              one answer from its tokens to its parts: stop strings, reasoning, log probabilities
    sampling             which token is next
    requests             every field of a request, checked; the settings that follow
    strict_json          the body, with limits
    limits               on the lengths and numbers of prompts and answers
    metrics              what is counted
    in_flight, settings  a request's state, and how its answers are generated
    errors               errors in OpenAI's form

The model and its attention are :mod:`polymoe.engines.transformers`'.
"""

from polymoe.serve.lifecycle import serve
from polymoe.serve.listener import bind

__all__ = ["bind", "serve"]
