"""Architectures: what Transformers itself says of a model's experts, for every model that has its experts interface.

The config builds the model on ``meta``. Its experts modules give sizes and activation, their names the layers, and
Transformers' own conversions the names and the arrangement of tensors in files. Nothing is listed by model, and what
cannot be established is refused. Importing this package needs Transformers.

.. code-block:: text

    families     from a config to its experts and where they are in files
    experts      experts modules of a model in groups of equal ones
    names        names and arrangements of their tensors in files
    activation   which activation a module computes, by evaluating it
    interface    the properties and parameters of experts modules
    config       configs without what names code, and models on ``meta``
"""
