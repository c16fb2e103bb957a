"""The machine: cores, memory, instruction sets, installed runtimes, measured peaks."""
