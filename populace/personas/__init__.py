"""Populations of personas: from distributions in a file to rows, and from rows to people.

``spec`` reads population files, ``sampling`` draws rows (any slice of a population without the
rest), ``fit`` tells how well the rows meet what was asked for.
"""
