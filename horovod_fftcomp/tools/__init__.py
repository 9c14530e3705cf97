"""Implementation of the commands; ``cli`` has their arguments and output."""
