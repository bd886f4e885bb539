"""What the adapters of serving engines share; no engine is imported here."""
