"""What ships: the folder, its manifest, test vectors, generated files, and padding to a bounded batch."""
