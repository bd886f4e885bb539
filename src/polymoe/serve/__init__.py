"""``polymoe serve``: one model behind an OpenAI-compatible address.

The modules, from the outside in. A request takes this way, and a module imports only from modules below it
(``tests/test_imports.py``):

.. code-block:: text

    lifecycle            builds what follows, runs it until a signal, ends it cleanly
    listener             the socket
    gate                 API key, size and number of requests; watches whether the client is still connected
    app                  the endpoints: Transformers' handlers, each request checked first
    profiling            two more endpoints, on request
    generation           which manager runs a request:
      sequential           one generation after the other
      continuous_batching  shared forward passes
    streams              the answer's way back to the handler: stop strings, counted tokens, server-sent events
    requests             checks of fields, limits on lengths
    metrics              what is counted
    in_flight, errors    a request's state; errors in OpenAI's form

The model and its attention are :mod:`polymoe.engines.transformers`'.
"""

from polymoe.serve.lifecycle import serve
from polymoe.serve.listener import bind

__all__ = ["bind", "serve"]
