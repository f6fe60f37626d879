"""DID IT REALLY RUN: what a test left behind, which attention ran, whether its numbers are right."""
