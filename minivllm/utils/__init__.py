"""Helpers that belong to no room: process start, titles and logs, NUMA and OpenMP settings, the rendezvous.

vLLM 0.25.1: vllm/utils/
Articles: part 2 §2.7
"""
