"""Persona services: draw populations, have a model write their people, store them by name."""
