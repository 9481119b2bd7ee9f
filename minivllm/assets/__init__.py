"""Data that ships with minivllm: the bundled checkpoint and the scripts that make such data."""
