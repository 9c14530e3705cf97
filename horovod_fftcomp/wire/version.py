"""Version of the package; the handshake compares it between ranks."""

__version__ = "0.2.1"
