"""Checks and records of a training while it runs."""
