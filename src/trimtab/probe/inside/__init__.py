"""What runs in the script's process. It imports torch, the standard library and this package only, to start within 20 ms."""
