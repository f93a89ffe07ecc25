"""Texts as vectors: similar ones for a question and its passage."""
