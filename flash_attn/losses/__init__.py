"""Losses of flash-attn's API."""
