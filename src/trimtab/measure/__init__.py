"""Measuring: time in pairs, memory, energy, floating-point operations, parity, profiles, rooflines."""
