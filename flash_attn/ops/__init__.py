"""Operators under flash-attn's names."""
