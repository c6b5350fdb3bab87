"""Layers of flash-attn's API that trainers import: rotary embeddings."""
