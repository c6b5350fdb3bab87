"""Helpers of flash-attn's API."""
