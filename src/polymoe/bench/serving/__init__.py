"""Bench of servers: requests to any OpenAI-compatible server, timed as its clients see them, as tables and records."""
