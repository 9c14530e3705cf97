"""Ops of the host, and messages of payloads there."""
