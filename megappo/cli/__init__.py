"""The `megappo` command: one file per sub-command, each parses, calls and prints. Imports no torch."""
