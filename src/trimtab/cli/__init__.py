"""The command line: a command parses, calls one function of the API, prints."""
