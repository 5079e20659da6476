"""Ahead-of-time compiled EAGLE speculative decoding for Llama models."""

__version__ = "0.1.0"
