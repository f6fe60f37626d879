"""NVML and CUDA libraries that answer whatever a test asks them to."""
