"""Personas in words: prompts, names, checks, and the loop that writes one.

``template`` holds the meta prompt of each language, ``names`` draws names, ``checks`` compares a
text with its row, ``alike`` finds texts that are nearly the same, ``writer`` puts them together.
"""
