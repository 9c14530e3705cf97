"""Monitoring of a running training: checks, warnings and records."""
