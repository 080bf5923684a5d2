"""Measurements of Skim on this machine: python -m skim.bench --help."""
