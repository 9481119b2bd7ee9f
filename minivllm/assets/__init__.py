"""Data that ships with minivllm: the bundled checkpoint and the scripts that make such data.

vLLM 0.25.1: no counterpart
Articles: –
"""
