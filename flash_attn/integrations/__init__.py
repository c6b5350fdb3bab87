"""Adapters for training frameworks, one module each. Importing this package imports none of the
frameworks."""
