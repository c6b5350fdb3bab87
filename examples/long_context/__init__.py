"""Parts of examples/long_context_sp.py."""
