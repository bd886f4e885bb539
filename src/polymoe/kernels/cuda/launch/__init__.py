"""Launches of the compiled kernels. They are prepared once per configuration of a layer; calls set only addresses.

:mod:`.steps` has the launches as data, :mod:`.shape` the values that follow from the number of tokens, :mod:`.call` the
launcher, :mod:`.layer` what it needs of a layer, and :mod:`.args` the kernels' arguments.
"""
