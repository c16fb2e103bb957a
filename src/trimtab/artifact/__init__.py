"""The artifact: its folder, manifest, test vectors and generated files, and padding to a bounded batch."""
