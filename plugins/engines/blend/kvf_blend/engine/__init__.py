"""The engine's half: `client.py` for any engine, the rest for transformers. Runs in engine processes."""
