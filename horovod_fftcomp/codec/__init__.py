"""Codecs: arrays to payloads and back."""
