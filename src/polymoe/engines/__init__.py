"""Thin adapters that run polymoe's experts inside other model runners. The core never imports them."""
