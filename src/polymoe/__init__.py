"""polymoe."""
