"""Compression in a script that does not mention it."""
