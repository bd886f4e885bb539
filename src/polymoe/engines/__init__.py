"""Engines: thin adapters that put polymoe's experts into other people's model runners. The core never imports them."""
