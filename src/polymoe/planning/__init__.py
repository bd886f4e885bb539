"""Selects and plans backends from predicted or measured times. Pure Python: nothing here runs a kernel."""
