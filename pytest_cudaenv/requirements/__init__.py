"""What a test needs: pure functions of (requirement, host) -> reasons. Imports neither pytest nor torch."""
