"""Detect how this process was started: read a launcher's environment variables and the parents' command lines
into a `Launched`. Starts nothing and imports no torch."""
