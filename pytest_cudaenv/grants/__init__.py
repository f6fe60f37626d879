"""Who gets which device."""
