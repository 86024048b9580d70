"""The typed experiment tree: one file per section, loading from YAML, and cross-checks. Imports no torch."""
