"""Benchmarks: named cases, checked before they are timed, with records that say how to repeat them."""
