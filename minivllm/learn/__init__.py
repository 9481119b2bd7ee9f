"""Exercises: small programs with one defect of the multi-process layer each, and checks with real processes.

vLLM 0.25.1: no counterpart
Articles: –

An exercise is a package in `exercises/`: what is said about it (`__init__.py`), the file that a learner starts from
(`stub.py`), the invariants and how they are tried (`check.py`), and one way to keep them (`solution.py`).
"""
