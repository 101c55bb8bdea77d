"""Fuzzing of all that comes from outside: one module a surface, from valid artefacts that are changed at random.

`pytest tests/fuzz` takes some examples of each; `python -m tests.fuzz --minutes 60` as many as fit.
"""
