"""State of a process that trains: random generators, torch's settings, modes, snapshots, the world of processes."""
