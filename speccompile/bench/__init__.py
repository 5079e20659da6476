"""Measures engines against plain decoding and against transformers, as ratios within one run."""
