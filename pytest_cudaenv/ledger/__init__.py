"""What ran where: the header before a run and the summary after it."""
