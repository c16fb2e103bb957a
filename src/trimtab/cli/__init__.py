"""The command line: each command parses its options, calls one function of the API, and prints the result."""
