"""Two runs of lm-eval, compared: what ``polymoe eval compare`` computes.

lm-eval asks the server and judges the answers (``docs/evaluation.md``). :func:`read_samples` reads what it writes with
``--log_samples``, and :func:`compare` pairs two runs by question, which lm-eval does not.
"""

from polymoe.evaluate.samples import Samples, read_samples
from polymoe.evaluate.scores import Difference, compare

__all__ = ["Difference", "Samples", "compare", "read_samples"]
