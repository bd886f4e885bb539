"""Benchmarks of servers: requests to any OpenAI-compatible server, timed by the client, as tables and records."""
