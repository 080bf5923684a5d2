"""Skim in training frameworks: huggingface (its Trainer), accelerate, lightning. docs/integrations.md has scripts."""
