"""The version, read by the build and by `pytest-cudaenv --version`."""

__version__ = "0.1.0.dev0"
