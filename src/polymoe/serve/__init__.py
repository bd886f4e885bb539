"""``polymoe serve``: one model behind an OpenAI-compatible address.

The modules, from the outside in. A request takes this way, and a module imports only from modules below it
(``tests/test_imports.py``):

.. code-block:: text

    lifecycle            builds what follows, runs it until a signal, ends it cleanly
    http_server          the socket, and uvicorn's server on it
    gate                 API key, headers, size and number of requests; watches whether the client is still connected
    summary, logs        what the server says at its start, and logs while it runs
    app                  the endpoints: each request is prepared, its answers are generated and written
    prompts              beside the event loop: messages, chat templates, tokens
    messages             the messages of a chat, checked
    generation           chooses what runs requests:
      sequential           one generation after the other
      continuous_batching  shared forward passes, in which shared_sampling chooses the tokens
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

__all__ = ["serve"]
