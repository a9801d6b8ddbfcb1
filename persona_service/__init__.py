"""The persona service: samples populations, and has their personas written."""
