"""Bench: named cases, checked before they are timed, as records that say how to repeat them."""
