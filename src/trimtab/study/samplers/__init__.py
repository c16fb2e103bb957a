"""What a study tries next."""
