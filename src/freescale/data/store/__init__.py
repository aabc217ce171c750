"""Histories on disk: how they are laid out, written, read and checked. Works without torch."""
