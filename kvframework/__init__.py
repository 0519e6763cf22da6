"""kvframework: a plugin-architecture storage framework for the KV cache of LLM inference engines."""

__version__ = "0.3.0.dev0"
