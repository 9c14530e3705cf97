"""Implementation of ``run``: import hook, launcher and step report."""
