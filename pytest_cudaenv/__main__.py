"""`python -m pytest_cudaenv` is the command `pytest-cudaenv`."""

from pytest_cudaenv.cli import main

raise SystemExit(main())
