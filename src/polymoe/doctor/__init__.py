"""``polymoe doctor``: what this machine has, and each backend's verdict on it."""
