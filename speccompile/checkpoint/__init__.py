"""Reads model and head files from disk and validates them; nothing here compiles or runs a model."""
