"""What is here: devices, driver and software, as frozen facts. Imports neither pytest nor torch."""
