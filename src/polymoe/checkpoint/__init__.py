"""Checkpoints: files and configs in, expert weights in one convention out, and back."""
