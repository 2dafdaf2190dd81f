"""Outputs that follow a grammar: specifications, their compilation aside from the engine's loop, and their masks."""
